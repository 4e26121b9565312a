"""Write heartbeats, one small file per rank (RUN/heartbeats/rank-N.json), and find the rank that others wait for."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from records.files import host_name, write_atomically

# missed heartbeats of a rank that is not alive
SILENT_INTERVALS = 3


def interval_s(hang_timeout_s: float) -> float:
    """Return the seconds between two heartbeats, or two looks."""
    return min(5.0, hang_timeout_s / 6)


class Heartbeat:
    """A worker's heartbeat, written by a thread; `beat` marks every step."""

    current: Heartbeat | None = None  # of this process

    def __init__(self, folder: Path, rank: int, hang_timeout_s: float, start_timeout_s: float):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank-{rank}.json"
        self.stacks = open(folder / f"rank-{rank}.stacks", "w")  # noqa: SIM115 - faulthandler keeps its descriptor
        self.hang_timeout_s, self.interval_s = hang_timeout_s, interval_s(hang_timeout_s)
        self.state: dict[str, Any] = {
            "rank": rank,
            "host": host_name(),
            "pid": os.getpid(),
            "step": None,
        }
        # how many were passed, and what the rank is doing since the last
        self.state["mark"] = 0, "the start"
        # its watchdog needs neither a signal from outside, so it works on every node, nor the interpreter's lock
        faulthandler.dump_traceback_later(start_timeout_s, file=self.stacks)
        threading.Thread(target=self._write_periodically, daemon=True, name="heartbeat").start()
        Heartbeat.current = self

    def beat(self, step: int) -> None:
        """Mark a step as finished by this rank."""
        self.state["step"] = step
        self.enter(f"the end of step {step}")
        faulthandler.dump_traceback_later(self.hang_timeout_s, file=self.stacks)

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[Callable[[str], None]]:
        """Give `enter` for the parts of a step, which ends with the block."""
        yield lambda part: self.enter(f"{part} of step {step}")
        self.beat(step)

    def enter(self, activity: str) -> None:
        """Mark what this rank is about to do."""
        self.state["mark"] = (self.state["mark"][0] + 1, activity)

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def _write_periodically(self) -> None:
        while True:
            # a full disk must not end the job; the supervisor sees an old file
            with contextlib.suppress(OSError):
                write_atomically(self.path, json.dumps({**self.state, "time": time.time()}))
            time.sleep(self.interval_s)


def enter(activity: str) -> None:
    """`Heartbeat.enter` for code that is not handed the heartbeat."""
    if Heartbeat.current is not None:
        Heartbeat.current.enter(activity)


def read_heartbeats(folder: Path) -> dict[int, dict[str, Any]]:
    beats = {}
    for path in folder.glob("rank-*.json"):
        with contextlib.suppress(OSError, ValueError):
            beat = json.loads(path.read_text())
            beats[beat["rank"]] = beat
    return beats


class HangWatch:
    """The supervisor's side: which ranks are alive and make progress, by its own clock."""

    def __init__(
        self,
        folder: Path,
        ranks: int,
        hang_timeout_s: float,
        start_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.folder, self.ranks, self.clock = folder, ranks, clock
        self.hang_timeout_s, self.start_timeout_s = hang_timeout_s, start_timeout_s
        self.beats: dict[int, dict[str, Any]] = {}
        # when a rank's heartbeat last changed, by this clock: the nodes' own may differ
        self.changed_s: dict[int, float] = {}
        self.advanced_s = clock()

    def look(self) -> float | None:
        """Read all heartbeats; return the seconds without a finished step, once above the timeout."""
        before, self.beats, now = self.beats, read_heartbeats(self.folder), self.clock()
        self.changed_s |= {
            rank: now for rank, beat in self.beats.items() if beat != before.get(rank)
        }
        steps = {rank: beat["step"] for rank, beat in self.beats.items()}
        if steps != {rank: beat["step"] for rank, beat in before.items()}:
            self.advanced_s = now
        # the first step compiles and loads: it has a timeout of its own
        started = any(step is not None for step in steps.values())
        waited_s = now - self.advanced_s
        return (
            waited_s
            if waited_s > (self.hang_timeout_s if started else self.start_timeout_s)
            else None
        )

    @property
    def step(self) -> int:
        """The last step that any rank has finished."""
        return max((beat["step"] or 0 for beat in self.beats.values()), default=0)

    def blame(self, ended: bool = False) -> tuple[list[int], str]:
        """Return the ranks that the others wait for, and what every rank does in words.

        Args:
            ended: the ranks are dead by now, so that silence says nothing.
        """
        silent_s = SILENT_INTERVALS * interval_s(self.hang_timeout_s)
        # (marks passed, what it does); -2 and -1 come before every mark
        places: dict[int, tuple[int, str]] = {}
        for rank in range(self.ranks):
            beat = self.beats.get(rank)
            if beat is None:
                places[rank] = (-2, "never reported")
            elif not ended and self.clock() - self.changed_s[rank] > silent_s:
                places[rank] = (-1, f"silent, last in {beat['mark'][1]}")
            else:
                places[rank] = (beat["mark"][0], f"in {beat['mark'][1]}")
        # When one rank hangs, all others wait for it. Every rank marks what it is about to do before it
        # may wait for others, so who has passed fewest marks is the one that the others wait for
        last = min(place for place, _ in places.values())
        behind = [rank for rank, (place, _) in places.items() if place == last]
        counts = Counter(words for _, words in places.values()).most_common(4)
        # where most ranks are no further, none keeps the others waiting
        if len(behind) > self.ranks / 2:
            total = f"all {self.ranks} ranks" if len(counts) == 1 else "ranks"
            return [], f"no suspect: {total} " + ", ".join(
                words if len(counts) == 1 else f"{n} {words}" for words, n in counts
            )
        laggards = ", ".join(
            f"rank {rank} on {self._host(rank)} {places[rank][1]}" for rank in behind[:4]
        )
        others = ", ".join(
            f"{n} {words}" for words, n in counts if words not in {places[r][1] for r in behind}
        )
        return behind, f"{laggards}; the other ranks: {others}"

    def _host(self, rank: int) -> str:
        return self.beats[rank]["host"] if rank in self.beats else "an unknown host"
