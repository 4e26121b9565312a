"""Forks training workers from a process that has imported TorchTitan once: a job then starts in a
fraction of a second.

    python -m tests.train.fork_server

Each line of stdin is a job, {"arguments", "ranks", "environment", "port", "log"}; the answer is the list
of exit statuses. The workers are processes that run `train.__main__.main` with the environment that
torchrun would set, and as with torchrun, the first failure ends the others. What depends on torchrun
itself is tested with torchrun.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import types
from typing import Any, NoReturn

import train.__main__ as program  # isort: skip - patches torch for CPUs before TorchTitan is imported
import torchtitan.train
from torchtitan.config import ConfigManager

import train.spec
import train.trainer  # noqa: F401
from train.supervise.signals import WORKER

GRACE_S = 5.0  # for the other ranks, to say what they saw of a failure


def work(job: dict[str, Any], rank: int) -> NoReturn:
    """Become one rank of the job."""
    status = 1
    try:
        log = os.open(job["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["ranks"], "LOCAL_WORLD_SIZE": job["ranks"],
                 "MASTER_ADDR": "localhost", "MASTER_PORT": job["port"]}  # fmt: skip
        os.environ.update({**job["environment"], **{name: str(value) for name, value in place.items()}})
        sys.argv = [program.__file__, *job["arguments"]]
        ConfigManager.parse_args.__defaults__ = (job["arguments"],)  # sys.argv[1:] as it was at the import
        # its pause of two seconds "for other ranks to complete": our trainer ends in a barrier
        torchtitan.train.time = types.SimpleNamespace(**{**vars(time), "sleep": lambda s: None})  # type: ignore[attr-defined]
        WORKER.install()
        program.main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(job: dict[str, Any]) -> list[int]:
    """Exit statuses by rank, negative for a signal."""
    sys.stdout.flush()
    running = {os.fork() or work(job, rank): rank for rank in range(job["ranks"])}
    statuses, deadline = [0] * job["ranks"], None
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            statuses[running.pop(pid)] = os.waitstatus_to_exitcode(status)
            deadline = time.monotonic() + GRACE_S if status and deadline is None else deadline
        elif deadline is not None and time.monotonic() > deadline:
            for other in running:
                os.kill(other, signal.SIGKILL)
            deadline = float("inf")
        else:
            time.sleep(0.01)
    return statuses


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
