"""Import TorchTitan once in a process that forks to run `python -m train`.

    python -m tests.train.fork_server

Imports take eight seconds, a fork a few milliseconds. Here and in forks, `subprocess` runs
`python -m NAME` for the programs in WARM by a fork with the arguments, environment, signal handlers
and descriptors as after exec; supervisor, torchrun's agent and ranks are real processes.
tests/train/test_production.py has a job that is really started.

Each line of stdin is a job, {"command", "environment", "log"}, answered by its exit status.
`command` is the command line of one process; with "ranks" and "limit_s" it is the arguments of
`python -m train` for that many processes without torchrun, answered by a list of exit statuses;
the first failure ends the others.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import io
import itertools
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from train.supervise.workers import hold_port

# without what imports add to it
ENVIRONMENT = dict(os.environ)
# `python -m train` raises it
OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
# for the other ranks, to say what they saw of a failure
GRACE_S = 5.0
TIMEOUT_S = 1100.0
WARM = (
    "train",
    "train.supervise",
    "train.supervise.preflight",
    "train.job_config",
    "torch.distributed.run",
    "tools.ablate",
    "tools.bench.llama",
)


class Popen(subprocess.Popen):
    """subprocess.Popen that forks this process where it would start a warm program."""

    def __init__(self, args: Any, **options: Any):
        if (program := warm_program(args)) is not None:
            environment = options.get("env")
            environment = dict(os.environ if environment is None else environment)
            become = functools.partial(
                become_program, program, environment, options.get("pass_fds", ())
            )
            # never returns, so nothing is executed
            options["preexec_fn"] = become
        super().__init__(args, **options)


def warm_program(command: Any) -> list[str] | None:
    """Return NAME and arguments of `python [-u] -m NAME ...` if NAME is in WARM."""
    if isinstance(command, str | bytes | os.PathLike) or command[0] != sys.executable:
        return None
    rest = [part for part in command[1:3] if part != "-u"] + list(command[3:])
    return rest[1:] if rest[:1] == ["-m"] and rest[1] in WARM else None


def become_program(
    program: list[str], environment: dict[str, str], passed: Sequence[int]
) -> NoReturn:
    """Run a module as `python -m` does, in a new process, and end."""
    status = 1
    try:
        # subprocess turns it off around a fork
        gc.enable()
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # subprocess resets them, a new interpreter ignores them
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN)
        # all but what is passed on; whoever started this learns by it that all went well
        for before, behind in itertools.pairwise((2, *sorted(passed), os.sysconf("SC_OPEN_MAX"))):
            os.closerange(before + 1, behind)
        resource.setrlimit(resource.RLIMIT_NOFILE, OPEN_FILES)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.FileIO(n, "wb", closefd=False), write_through=True) for n in (1, 2)
        )
        faulthandler.enable(2)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["-m", *program[1:]]
        titan: Any = importlib.import_module("torchtitan.train")
        # sys.argv[1:] as it was at the import, which tools.bench.llama reads
        titan.ConfigManager.parse_args.__defaults__ = (program[1:],)
        # its pause of two seconds "for other ranks to complete": our trainer ends in a barrier
        titan.time = types.SimpleNamespace(**{**vars(time), "sleep": lambda s: None})
        for name in (program[0], f"{program[0]}.__main__"):
            if not hasattr(sys.modules.get(name), "__path__"):
                # what runs is a module of its own, as with `python -m`
                sys.modules.pop(name, None)
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(job: dict[str, Any]) -> int | list[int]:
    """Return exit statuses, negative for a signal."""
    with open(job["log"], "ab") as log:
        if "ranks" not in job:
            environment = {**ENVIRONMENT, **job["environment"]}
            with Popen(
                job["command"], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            ) as process:
                Path(job["pid"]).write_text(str(process.pid))
                return wait_for_end(process, job["log"])
        return run_ranks(job, log)


def wait_for_end(process: subprocess.Popen, log: str) -> int:
    """Return the exit status; after TIMEOUT_S log the process's stacks and kill it."""
    try:
        return process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        # faulthandler prints all stacks
        process.send_signal(signal.SIGABRT)
        with open(log, "a") as file:
            file.write(f"{process.args}: did not end within {TIMEOUT_S} s\n")
        return process.wait(30)


def run_ranks(job: dict[str, Any], log: Any) -> list[int]:
    size, running = job["ranks"], list[subprocess.Popen]()
    command = [sys.executable, "-m", "train", *job["command"]]
    with hold_port() as holder:
        place = {
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": holder.getsockname()[1],
        }
        for rank in range(size):
            numbers = {
                name: str(value)
                for name, value in (place | {"RANK": rank, "LOCAL_RANK": rank}).items()
            }
            environment = {**ENVIRONMENT, **job["environment"], **numbers}
            running.append(
                Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )
        last_s, failed = time.monotonic() + job["limit_s"], False
        # a list, not any(): every process is polled each time
        while None in [process.poll() for process in running]:
            # the others have GRACE_S to report what they saw of the failure
            if not failed and (failed := any(process.returncode for process in running)):
                last_s = min(last_s, time.monotonic() + GRACE_S)
            if time.monotonic() > last_s:
                end_all(running, with_stacks=not failed)
            time.sleep(0.01)
    return [process.returncode for process in running]


def end_all(running: list[subprocess.Popen], with_stacks: bool) -> None:
    """Kill all; `with_stacks`, after each has printed its stacks to the log."""
    for process in running if with_stacks else ():
        process.send_signal(signal.SIGABRT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        for process in running if with_stacks else ():
            process.wait(10)
    for process in running:
        process.kill()


# before torch's agent takes it by name
subprocess.Popen = Popen

for name in (
    # patches torch for CPUs before TorchTitan is imported
    "train.__main__",
    "torch.distributed.run",
    "torchtitan.train",
    "train.spec",
    "train.trainer",
    "train.supervise.__main__",
):
    importlib.import_module(name)

if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
