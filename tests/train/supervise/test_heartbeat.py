"""Tests of which rank is blamed for a hang, by the supervisor's clock and the ranks' marks."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from train.supervise.heartbeat import HangWatch, Heartbeat, read_heartbeats

# heartbeats every 5 s, silent after three
TIMEOUT_S = 60.0


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def beat(
    folder: Path, rank: int, mark: tuple[int, str], written: float, step: int | None = 7
) -> None:
    content = {
        "rank": rank,
        "host": f"n{rank}",
        "pid": 1,
        "step": step,
        "mark": mark,
        "time": written,
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(content))


def find_blame(
    folder: Path, marks: list[tuple[int, str] | None], dead: tuple[int, ...] = ()
) -> tuple:
    # a mark of None: the rank never reported; `dead` ranks wrote nothing after the start
    clock = Clock()
    # the clock of every node is wrong, each by another minute
    watch = HangWatch(folder, len(marks), TIMEOUT_S, TIMEOUT_S, clock)
    waited_s = None
    while waited_s is None:
        for rank, mark in enumerate(marks):
            if mark is not None and (rank not in dead or clock.now_s == 0):
                beat(folder, rank, mark, written=clock.now_s - 60 * rank)
        waited_s = watch.look()
        clock.now_s += 5
    assert TIMEOUT_S < waited_s <= TIMEOUT_S + 5
    return watch.blame()


EXCHANGE, READING = (42, "the exchange of step 8"), (40, "reading the data of step 8")


@pytest.mark.parametrize(
    ("marks", "dead", "blamed", "words"),
    [
        (
            [EXCHANGE, EXCHANGE, READING, EXCHANGE],
            (),
            [2],
            "rank 2 on n2 in reading the data of step 8; the other ranks: 3 in the exchange of step 8",
        ),
        ([EXCHANGE] * 4, (), [], "no suspect: all 4 ranks in the exchange of step 8"),
        (
            [READING, EXCHANGE, READING, READING],
            (),
            [],
            "no suspect: ranks 3 in reading the data of step 8, 1 in the exchange of step 8",
        ),
        (
            [READING, EXCHANGE, EXCHANGE, EXCHANGE],
            (3,),
            [3],
            "rank 3 on n3 silent, last in the exchange of step 8; ",
        ),
        ([EXCHANGE, EXCHANGE, None], (0,), [2], "rank 2 on an unknown host never reported"),
        (
            [EXCHANGE] * 3,
            (0, 1, 2),
            [],
            "no suspect: all 3 ranks silent, last in the exchange of step 8",
        ),
    ],
    ids=[
        "never arrived",
        "all in one place",
        "most behind",
        "silent, whatever the clocks say",
        "never reported",
        "a dead file system",
    ],
)
def test_who_is_blamed_for_a_hang(tmp_path, marks, dead, blamed, words):
    ranks, output = find_blame(tmp_path, marks, dead)
    assert ranks == blamed
    assert output.startswith(words)


def test_a_worker_writes_what_it_does(tmp_path):
    heartbeat = Heartbeat(tmp_path, rank=3, hang_timeout_s=0.3, start_timeout_s=60)
    heartbeat.beat(5)
    heartbeat.enter("the exchange of step 6")
    while read_heartbeats(tmp_path).get(3, {}).get("mark", [0])[0] < 2:
        time.sleep(0.01)
    heartbeat.close()
    written = read_heartbeats(tmp_path)[3]
    assert (written["step"], written["mark"]) == (5, [2, "the exchange of step 6"])
