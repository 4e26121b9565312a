"""Which rank is blamed for a hang: by the supervisor's own clock, and by the marks that every rank passes."""

from __future__ import annotations

import json
from pathlib import Path

from train.supervise.heartbeat import HangWatch, Heartbeat, read_heartbeats

TIMEOUT_S = 60.0  # heartbeats every 5 s, silent after three


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def beat(folder: Path, rank: int, mark: tuple[int, str], written: float, step: int | None = 7) -> None:
    content = {"rank": rank, "host": f"n{rank}", "pid": 1, "step": step, "mark": mark, "time": written}
    (folder / f"rank-{rank}.json").write_text(json.dumps(content))


def blamed_after_a_hang(
    folder: Path, marks: list[tuple[int, str] | None], dead: tuple[int, ...] = ()
) -> tuple:
    """(ranks, words) for ranks that stand at these marks; None: never reported; dead: wrote no
    more after the start.

    The clock of every node is wrong, each by another minute.
    """
    clock = Clock()
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


def test_the_rank_that_never_arrived_is_blamed(tmp_path: Path) -> None:
    ranks, words = blamed_after_a_hang(tmp_path, [EXCHANGE, EXCHANGE, READING, EXCHANGE])
    assert ranks == [2]
    assert words == "rank 2 on n2 in reading the data of step 8; the other ranks: 3 in the exchange of step 8"


def test_nobody_is_blamed_when_all_wait_in_the_same_place(tmp_path: Path) -> None:
    assert blamed_after_a_hang(tmp_path, [EXCHANGE] * 4) == (
        [],
        "no suspect: all 4 ranks in the exchange of step 8",
    )


def test_nobody_is_blamed_when_most_are_behind(tmp_path: Path) -> None:
    ranks, words = blamed_after_a_hang(tmp_path, [READING, EXCHANGE, READING, READING])
    assert (ranks, words) == (
        [],
        "no suspect: ranks 3 in reading the data of step 8, 1 in the exchange of step 8",
    )


def test_a_silent_rank_is_blamed_whatever_the_clocks_of_the_nodes_say(tmp_path: Path) -> None:
    ranks, words = blamed_after_a_hang(tmp_path, [READING, EXCHANGE, EXCHANGE, EXCHANGE], dead=(3,))
    assert ranks == [3]
    assert words.startswith("rank 3 on n3 silent, last in the exchange of step 8; ")


def test_a_rank_that_never_reported_is_blamed_first(tmp_path: Path) -> None:
    assert blamed_after_a_hang(tmp_path, [EXCHANGE, EXCHANGE, None], dead=(0,))[0] == [2]


def test_a_dead_file_system_blames_nobody(tmp_path: Path) -> None:
    ranks, words = blamed_after_a_hang(tmp_path, [EXCHANGE] * 3, dead=(0, 1, 2))
    assert (ranks, words) == ([], "no suspect: all 3 ranks silent, last in the exchange of step 8")


def test_a_worker_writes_what_it_does(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, rank=3, hang_timeout_s=0.3, start_timeout_s=60)
    heartbeat.beat(5)
    heartbeat.enter("the exchange of step 6")
    while read_heartbeats(tmp_path).get(3, {}).get("mark", [0])[0] < 2:
        pass
    heartbeat.close()
    written = read_heartbeats(tmp_path)[3]
    assert (written["step"], written["mark"]) == (5, [2, "the exchange of step 6"])
