"""An experiment's job of the shipped trainer: its file, and the one process that runs it."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tomli_w

from records.files import write_atomically
from train.supervise.attempt import exit_words, hold_port, last_text

ERROR_BYTES = 2000  # of a log whose run has failed
UNDER_WAY: set[subprocess.Popen[bytes]] = set()  # the trainers of this process, of all threads
Sections = Mapping[str, Mapping[str, Any]]


def with_sections(job: Sections, own: Sections) -> dict[str, dict[str, Any]]:
    """The sections of a job file, with the keys of `own` in place of theirs."""
    return {name: {**job.get(name, {}), **own.get(name, {})} for name in {**job, **own}}


def write_job(path: Path, job: Sections) -> None:
    """Write the job file of a run into its folder. ValueError where another one is there."""
    text = tomli_w.dumps(job)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise ValueError(f"{path.parent} was trained with other settings; choose another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)


def train(
    path: Path, *flags: str, ends: Sequence[int], limit_s: float = math.inf, log: Path | None = None,
    environment: Mapping[str, str] = {},
) -> int:  # fmt: skip
    """`python -m train` as the only rank of a job, which goes on at its newest checkpoint; returns its exit code.

    The run is asked to save and stop after `limit_s`, and where we are interrupted. log: receives its output;
    default: stderr does. Raises ValueError unless the code is one of `ends`.
    """
    (path.parent / "outcome.json").unlink(missing_ok=True)
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    command = [sys.executable, "-m", "train", "--job.config_file", str(path), *flags]
    with hold_port() as holder, open(log, "ab") if log else contextlib.nullcontext(sys.stderr) as output:
        rank |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(holder.getsockname()[1])}
        process = subprocess.Popen(
            command, env={**os.environ, **rank, **environment}, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,  # Ctrl-C is ours to pass on
        )  # fmt: skip
        UNDER_WAY.add(process)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            (path.parent / "stop").touch()
        except BaseException:
            process.terminate()
            raise
        finally:
            code = process.wait()
            UNDER_WAY.discard(process)
    if code not in ends:
        told = f"its log is {log}, which ends:\n{last_text(log, ERROR_BYTES)}" if log else "see its messages"
        raise ValueError(f"{path.parent} has failed ({exit_words(code)}); {told}")
    return code


@contextlib.contextmanager
def runs_side_by_side(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Threads for calls of `train`. Where one fails or we are interrupted, no other run begins, and those under way
    save and end.
    """
    with ThreadPoolExecutor(workers) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in tuple(UNDER_WAY):
                process.terminate()  # it saves a checkpoint first
            raise


def same_origin(kept: Iterable[Mapping[str, Any]], now: Mapping[str, Any], path: Path) -> None:
    """ValueError unless all results that a file has kept come from what `now` says."""
    for origin in kept:
        if differing := [name for name in now if origin.get(name) != now[name]]:
            raise ValueError(f"{path} holds results of another {', '.join(differing)}; choose another --out")
