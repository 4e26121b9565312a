"""Heartbeats, one small file per rank (RUN/heartbeats/rank-N.json), and the ranks to blame when progress stops.

A thread writes the file every few seconds: its age shows whether the process is alive, its `step` whether it makes
progress. When one rank hangs, all others wait for it: alive, without progress.
Every rank dumps its own stacks into rank-N.stacks when it makes no progress for too long: faulthandler's watchdog needs
neither a signal from outside, so it works on every node, nor the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from records.files import host_name, write_atomically

LONGEST_INTERVAL_S = 5.0


class Heartbeat:
    """Written by a worker; `beat` at every step."""

    def __init__(self, folder: Path, rank: int, hang_timeout_s: float, start_timeout_s: float):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank-{rank}.json"
        self.stacks = open(folder / f"rank-{rank}.stacks", "w")  # noqa: SIM115 - faulthandler keeps its descriptor
        self.hang_timeout_s = hang_timeout_s
        self.interval_s = min(LONGEST_INTERVAL_S, hang_timeout_s / 6)
        self.state: dict[str, Any] = {"rank": rank, "host": host_name(), "pid": os.getpid(), "step": None}
        self.state["interval_s"] = self.interval_s
        self._since(start_timeout_s)
        threading.Thread(target=self._write_periodically, daemon=True, name="heartbeat").start()

    def beat(self, step: int) -> None:
        """This rank has finished a step."""
        self.state["step"] = step
        self._since(self.hang_timeout_s)

    def _since(self, timeout_s: float) -> None:
        self.state["since"] = time.time()
        faulthandler.dump_traceback_later(timeout_s, file=self.stacks)

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def _write_periodically(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # a full disk must not end the job; the supervisor sees an old file
                write_atomically(self.path, json.dumps({**self.state, "time": time.time()}))
            time.sleep(self.interval_s)


def read_heartbeats(folder: Path) -> list[dict[str, Any]]:
    """The last heartbeat of every rank, sorted by rank."""
    beats = []
    for path in folder.glob("rank-*.json"):
        try:
            beats.append(json.loads(path.read_text()))
        except (OSError, ValueError):
            continue
    return sorted(beats, key=lambda beat: beat["rank"])


def laggards(beats: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ranks to blame for a hang: those that went silent, else those with the lowest step.

    Silent: three heartbeats missed, counted from the newest heartbeat of all ranks.
    """
    newest = max((beat["time"] for beat in beats), default=0.0)
    silent = [beat for beat in beats if newest - beat["time"] > 3 * beat["interval_s"]]
    steps = [-1 if beat["step"] is None else beat["step"] for beat in beats]
    return silent or [beat for beat, step in zip(beats, steps, strict=True) if step == min(steps)]


class HangWatch:
    """The supervisor's side: has any rank made progress lately? Uses its own clock, not those of the nodes."""

    def __init__(self, folder: Path, hang_timeout_s: float, start_timeout_s: float):
        self.folder, self.hang_timeout_s, self.start_timeout_s = folder, hang_timeout_s, start_timeout_s
        self.seen: dict[int, Any] = {}
        self.advanced_s = time.monotonic()

    def hung_for_s(self) -> float | None:
        """Seconds since a rank last finished a step, once above the timeout; None before."""
        steps = {beat["rank"]: beat["step"] for beat in read_heartbeats(self.folder)}
        if steps != self.seen:
            self.seen, self.advanced_s = steps, time.monotonic()
        started = any(step is not None for step in steps.values())
        waited_s = time.monotonic() - self.advanced_s
        return waited_s if waited_s > (self.hang_timeout_s if started else self.start_timeout_s) else None
