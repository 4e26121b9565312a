"""Events of a run: events.jsonl, one line per event, and outcome.json, how the last attempt ended.

torchrun hides the exit status of its workers, so the worker that knows why the job ends writes outcome.json.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from records.files import append_line, host_name, write_atomically

# how a worker or the supervisor ends: exit status, and `code` in outcome.json; any other status is a crash
DONE = 0  # training.steps reached
CRASHED = 1
STOPPED = 85  # stopped on request with a checkpoint saved; start again to continue
BAD_STEP = 86  # the guard refused a step; its batch is recorded in events.jsonl

REASON_CHARS = 2000


def record_event(run: Path, kind: str, **facts: Any) -> None:
    """Append one line to RUN/events.jsonl; `rank` is null if the supervisor writes it."""
    rank = int(os.environ["RANK"]) if "RANK" in os.environ else None
    event = {"time": time.time(), "kind": kind, "rank": rank, "host": host_name(), **facts}
    try:
        append_line(run / "events.jsonl", json.dumps(event))
    except OSError as problem:  # such as a full disk, which must not end the job
        logging.getLogger().warning(f"events.jsonl cannot be written ({problem}): {event}")


def next_attempt(run: Path) -> int:
    """The number of the attempt that starts now: 1 for the first, else one more than attempts.jsonl has lines."""
    path = run / "attempts.jsonl"
    return 1 + (len(path.read_bytes().splitlines()) if path.is_file() else 0)


def write_outcome(run: Path, attempt: int, code: int, step: int, reason: str) -> None:
    """Leave RUN/outcome.json. The first word of an attempt stands: what other ranks say later are consequences."""
    before = read_outcome(run)
    if before is None or before["attempt"] != attempt:
        outcome = {"attempt": attempt, "code": code, "step": step, "reason": reason[:REASON_CHARS]}
        write_atomically(run / "outcome.json", json.dumps(outcome) + "\n")


def read_outcome(run: Path) -> dict[str, Any] | None:
    """The last outcome, None if there is none; the supervisor removes the file before every attempt."""
    try:
        return json.loads((run / "outcome.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


@contextmanager
def crash_on_record(run: Path, attempt: int, step: Any) -> Iterator[None]:
    """Record the exception that ends this worker. step: called when it happens."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as problem:  # DCP's CheckpointException is no Exception
        reason = f"{type(problem).__name__}: {problem}"
        run.mkdir(parents=True, exist_ok=True)
        write_outcome(run, attempt, CRASHED, step(), reason)
        record_event(run, "crash", attempt=attempt, step=step(), reason=reason[:REASON_CHARS])
        raise
