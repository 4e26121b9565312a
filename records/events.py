"""Events of a run: events.jsonl, one line per event, and outcome.json, how the last attempt ended."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from records.files import (
    Held,
    JsonObject,
    append_or_keep,
    host_name,
    read_json,
    survive_full_disk,
    write_atomically,
)

# how a worker or the supervisor ends: exit status, and `code` in outcome.json; any other status is a crash
DONE = 0  # training.steps reached
CRASHED = 1
# stopped on request, but without a new checkpoint; starting again repeats steps
STOPPED_UNSAVED = 84
STOPPED = 85  # stopped on request with a checkpoint saved; start again to continue
BAD_STEP = 86  # the guard refused a step; its batch is recorded in events.jsonl
REFUSED = 87  # the settings cannot work; starting again does not help

SUPERVISED = "LANEFORMER_SUPERVISED"  # environment variable of a supervised worker: its run folder
# before the first step these mean wrong settings; other exceptions, every OSError among them, may be
# gone next time
REFUSALS = (ValueError, AssertionError, KeyError, ZeroDivisionError, NotImplementedError)
REASON_CHARS = 2000
ADVICE = {  # by name of an exception: the setting that mends it
    "OutOfMemoryError": "lower training.local_batch_size (the batch stays training.global_batch_size, in more "
    "pieces), or raise parallelism.data_parallel_shard_degree; `python -m tools.plan` counts both. "
}
OTHER_RANKS_S = 1.0  # until rank 0 has said what every rank found


def record_event(run: Path, kind: str, **facts: Any) -> None:
    # torchrun sets RANK; the supervisor and the launcher have none
    rank = int(os.environ["RANK"]) if "RANK" in os.environ else None
    event = {"time": time.time(), "kind": kind, "rank": rank, "host": host_name(), **facts}
    append_or_keep(run / "events.jsonl", json.dumps(event))


def next_attempt(run: Path) -> int:
    """Return the number of the attempt that starts now, from 1."""
    # every attempt appends its line when it starts
    path = run / "attempts.jsonl"
    return 1 + (len(path.read_bytes().splitlines()) if path.is_file() else 0)


def write_outcome(run: Path, attempt: int, code: int, step: int, reason: str) -> None:
    """Leave RUN/outcome.json; the first word of an attempt stands."""
    # what other ranks say later are consequences
    before = read_outcome(run)
    if before is None or before["attempt"] != attempt:
        outcome = {"attempt": attempt, "code": code, "step": step, "reason": reason[:REASON_CHARS]}
        with survive_full_disk(run / "outcome.json"):
            write_atomically(run / "outcome.json", json.dumps(outcome) + "\n")


def read_outcome(run: Path) -> JsonObject | None:
    """Read the last outcome; None if there is none."""
    try:
        return read_json(run / "outcome.json")
    except (OSError, ValueError):
        return None


@contextmanager
def record_crash(
    run: Path, attempt: int, step: Callable[[], int], starting: Callable[[], bool]
) -> Iterator[None]:
    """Record the exception that ends this worker; `step` and `starting` are called when it happens."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as problem:  # DCP's CheckpointException is no Exception
        name = type(problem).__name__
        reason = f"{name}: {ADVICE.get(name, '')}{problem}"
        # wrong settings and missing files are one line of rank 0, not a traceback
        if starting() and isinstance(problem, (*REFUSALS, OSError)):
            # nothing here is this job's to write
            others = isinstance(problem, Held) and SUPERVISED not in os.environ
            refuse(None if others else run, attempt, problem)
        write_outcome(run, attempt, CRASHED, step(), reason)
        record_event(run, "crash", attempt=attempt, step=step(), reason=reason[:REASON_CHARS])
        raise


def refuse(run: Path | None, attempt: int, problem: BaseException) -> NoReturn:
    """End a worker that cannot start: the outcome, one line on stderr, SystemExit."""
    reason = str(problem)
    # other exceptions are not written for people: the place says more
    if not isinstance(problem, ValueError):
        place = traceback.extract_tb(problem.__traceback__)[-1]
        reason = (
            f"{type(problem).__name__}: {problem} ({place.filename}:{place.lineno}: {place.line})"
        )
    reason = " ".join(reason.split())[:REASON_CHARS]
    code = CRASHED if isinstance(problem, OSError) else REFUSED
    rank = os.environ.get("RANK", "0")
    # every rank may find the same problem: rank 0 speaks, another one only if the outcome says something else
    if rank != "0":
        time.sleep(OTHER_RANKS_S)
    outcome = read_outcome(run) if run is not None else None
    if run is not None:
        write_outcome(run, attempt, code, 0, reason)
    if rank == "0" or outcome is None or outcome["reason"] != reason:
        what = "The job is refused" if code == REFUSED else "The job cannot start"
        print(
            f"{what}: {f'rank {rank}: ' if rank != '0' else ''}{reason}",
            file=sys.stderr,
            flush=True,
        )
    raise SystemExit(code)
