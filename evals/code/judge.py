"""Scores solutions, each on the base and plus tests in a sandbox of its own."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import resource
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

from evals.code.inputs import convert_arguments
from evals.code.oracle import NOT_NONE, Oracle
from evals.code.solution import SandboxError, Solution, read_reference_value, read_value
from records.workers import end_with_parent

STATUSES = {100: "pass", 101: "fail", 102: "timeout"}  # by exit status; others are no verdict
TESTS = ("base", "plus")
SLOWER = 10.0  # than the reference solution; EvalPlus's default of 4 fails right solutions on a slow machine
MAX_CHECK_S = 60.0  # as in EvalPlus
REFERENCE_S = 600.0  # for one input
SMALL_PROCESSES = multiprocessing.get_context("forkserver")  # this one may hold a model
SMALL_PROCESSES.set_forkserver_preload([__name__])

# of score.py: what runs a solution, limits, data set, folder of expected outputs
Request = dict[str, Any]
Problem = dict[str, Any]


class Tests(NamedTuple):
    """Inputs of a problem, what its reference solution returned, and in how many seconds."""

    inputs: list[Any]
    expected: list[Any]
    seconds: list[float]


def reference(problem: Problem) -> str:
    return problem["prompt"] + problem["canonical_solution"]


def convert_inputs(problem: Problem, which: str) -> list[Any]:
    return convert_arguments(problem["task_id"], problem[f"{which}_input"])


def locate_expected(request: Request, problem: Problem, which: str) -> Path:
    # a line of JSON an output, up to 0.6 GB each, then one with the seconds that each took
    return Path(request["expected"]) / f"{problem['task_id'].replace('/', '-')}-{which}.jsonl"


def make_expected(request: Request, problem: Problem, which: str) -> None:
    """Run the reference solution if its outputs are missing; SandboxError if it fails."""
    path = locate_expected(request, problem, which)
    if path.exists():
        return
    inputs = convert_inputs(problem, which)
    seconds = list[float]()
    # complete or not at all: a later run would take half a file for all outputs
    part = path.with_suffix(f".{os.getpid()}")
    solution = Solution(request, reference(problem), problem["entry_point"], inputs)
    try:
        with open(part, "wb") as file:
            solution.receive(REFERENCE_S)
            for _ in inputs:
                took_s, line = time_receive(solution, REFERENCE_S)
                seconds.append(took_s)
                file.write(line + b"\n")
            file.write(json.dumps(seconds).encode())
        part.rename(path)
    except (EOFError, TimeoutError, ValueError) as error:
        where = f"{problem['task_id']}, input {len(seconds)} of {len(inputs)}"
        raise SandboxError(f"the reference solution of {where} gives no output: {error}") from None
    finally:
        solution.end()
        part.unlink(missing_ok=True)


def load_tests(request: Request, problem: Problem, which: str) -> Tests:
    with open(locate_expected(request, problem, which), "rb") as file:
        *values, seconds = (read_value(line, read_reference_value) for line in file)
    if problem["entry_point"] in NOT_NONE:
        values = [value is not None for value in values]
    return Tests(convert_inputs(problem, which), values, seconds)


def judge(
    request: Request, checks: Iterable[tuple[Problem, str, str]], parallel: int
) -> Iterator[tuple[int, str]]:
    """Yield (place in checks, status) as they end, each a `check` in a process of its own."""
    waiting = enumerate(checks)
    running = dict[Any, tuple[int, Any]]()  # by sentinel
    try:
        while True:
            for place, arguments in itertools.islice(waiting, parallel - len(running)):
                process = SMALL_PROCESSES.Process(
                    target=exit_with_status, args=(request, *arguments)
                )
                process.start()
                running[process.sentinel] = place, process
            if not running:
                return
            for sentinel in connection.wait(running):
                place, process = running.pop(sentinel)
                process.join()
                # killed by a limit, such as that on CPU time
                if process.exitcode < 0:
                    yield place, "timeout"
                elif process.exitcode in STATUSES:
                    yield place, STATUSES[process.exitcode]
                else:
                    raise SandboxError("a check could not be made; its reason stands above")
    finally:
        for _, process in running.values():
            process.kill()


def exit_with_status(request: Request, problem: Problem, which: str, code: str) -> None:
    """End this process with the exit status of the check's verdict, or 1."""
    end_with_parent()
    exit_status = 1
    limits = request["limits"]
    try:
        held_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        # what is expected, and what is returned
        memory_bytes = held_bytes + 2 * limits["memory_bytes"]
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"]))
        # it answers by its status alone: what a solution returns exhausts no memory but this
        # process's
        verdict = check(request, problem, which, code)
        (exit_status,) = (status for status, name in STATUSES.items() if name == verdict)
    except SandboxError as error:
        print(error, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(exit_status)


def check(request: Request, problem: Problem, which: str, code: str) -> str:
    """Return pass, fail or timeout. which: one of TESTS."""
    tests = load_tests(request, problem, which)
    limits_s = [max(request["min_time_limit_s"], SLOWER * seconds) for seconds in tests.seconds]
    # of waiting for the solution; reading what it sends and comparing take none
    left_s = min(MAX_CHECK_S, sum(limits_s)) + 1
    oracle = Oracle(request["dataset"], problem["entry_point"], problem["atol"])
    solution = Solution(request, code, problem["entry_point"], tests.inputs)
    try:
        left_s -= time_receive(solution, left_s)[0]
        for arguments, expected, limit_s in zip(
            tests.inputs, tests.expected, limits_s, strict=True
        ):
            seconds, line = time_receive(solution, min(limit_s, left_s))
            left_s -= seconds
            if not oracle.right(read_value(line), arguments, expected):
                return "fail"
        return "pass"
    except TimeoutError:
        return "timeout"
    except Exception:  # the solution has ended, or no rule takes what it returned
        return "fail"


def time_receive(solution: Solution, limit_s: float) -> tuple[float, bytes]:
    """Receive a line, and measure the seconds until it came."""
    started_s = time.monotonic()
    line = solution.receive(limit_s)
    return time.monotonic() - started_s, line
