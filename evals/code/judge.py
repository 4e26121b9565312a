"""Scores solutions, each on the base and plus tests in a sandbox of its own: a line of JSON a check.

    python -m evals.code.judge REQUEST.json

Expected outputs are what the reference solutions return in the same way, once for a data set, and stay here: a
solution never meets them. Every check is a process forked from this small one, which answers by its exit status
alone, so what a solution returns can exhaust no memory and no time but that of its own check.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evals.code.inputs import arguments_of
from evals.code.oracle import NOT_NONE, Oracle
from evals.code.solution import SandboxError, Solution, plain, read

PROBE = """
import os
def probe():
    try:
        os.fork()
    except PermissionError:
        return os.getpid()
"""
STATUSES = ("pass", "fail", "timeout")
TESTS = ("base", "plus")
SLOWER = 10.0  # than the reference solution; EvalPlus's default of 4 fails right solutions on a slow machine
MAX_CHECK_S = 60.0  # as in EvalPlus
REFERENCE_S = 600.0  # for one input

Request = dict[str, Any]
Problem = dict[str, Any]


class Tests(NamedTuple):
    """The inputs of one problem; what its reference solution returned, and the seconds that this took."""

    inputs: list[Any]
    expected: list[Any]
    seconds: list[float]


def inputs_of(problem: Problem, tests: str) -> list[Any]:
    return arguments_of(problem["task_id"], problem[f"{tests}_input"])


def outputs(request: Request, problem: Problem, inputs: list[Any]) -> tuple[list[bytes], list[float]]:
    """The lines that the reference solution sends, and the seconds for each input. SandboxError where it fails."""
    code = problem["prompt"] + problem["canonical_solution"]
    solution, found, seconds = Solution(request, code, problem["entry_point"], inputs), [], []
    try:
        solution.receive(REFERENCE_S)
        for _ in inputs:
            took_s, line = waited(solution, REFERENCE_S)
            found.append(line)
            seconds.append(took_s)
    except (EOFError, TimeoutError, ValueError) as error:
        where = f"{problem['task_id']}, input {len(found)} of {len(inputs)}"
        raise SandboxError(f"the reference solution of {where} gives no output: {error}") from None
    finally:
        solution.end()
    return found, seconds


class Expected:
    """What reference solutions return: a file of [task, tests, seconds] with a line of JSON an output.

    It takes half a gigabyte for a whole data set, so a check reads its own part alone. Made where it is missing.
    """

    def __init__(self, request: Request, problems: list[Problem]):
        self.path = Path(request["expected"])
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            try:
                self._make(request, problems, part)
                part.rename(self.path)
            finally:
                part.unlink(missing_ok=True)
        self.places: dict[tuple[str, str], tuple[int, list[float]]] = {}
        with open(self.path, "rb") as file:
            while line := file.readline():
                task, tests, seconds = json.loads(line)
                self.places[task, tests] = (file.tell(), seconds)
                for _ in seconds:
                    file.readline()

    @staticmethod
    def _make(request: Request, problems: list[Problem], path: Path) -> None:
        with open(path, "wb") as file:
            for problem, tests in itertools.product(problems, TESTS):
                lines, seconds = outputs(request, problem, inputs_of(problem, tests))
                head = json.dumps([problem["task_id"], tests, seconds]).encode()
                file.writelines(line + b"\n" for line in (head, *lines))

    def tests(self, problem: Problem, tests: str) -> Tests:
        place, seconds = self.places[problem["task_id"], tests]
        with open(self.path, "rb") as file:
            file.seek(place)
            values = [read(file.readline(), plain) for _ in seconds]
        if problem["entry_point"] in NOT_NONE:
            values = [value is not None for value in values]
        return Tests(inputs_of(problem, tests), values, seconds)


def check(request: Request, problem: Problem, expected: Expected, which: str, code: str) -> str:
    """One of STATUSES. SandboxError if its sandbox does not start. which: one of TESTS."""
    tests = expected.tests(problem, which)
    limits_s = [max(request["min_time_limit_s"], SLOWER * seconds) for seconds in tests.seconds]
    # of waiting for the solution; reading what it sends and comparing take none
    left_s = min(MAX_CHECK_S, sum(limits_s)) + 1
    oracle = Oracle(request["dataset"], problem["entry_point"], problem["atol"])
    solution = Solution(request, code, problem["entry_point"], tests.inputs)
    try:
        left_s -= waited(solution, left_s)[0]
        for arguments, wanted, limit_s in zip(tests.inputs, tests.expected, limits_s, strict=True):
            seconds, line = waited(solution, min(limit_s, left_s))
            left_s -= seconds
            if not oracle.right(read(line), arguments, wanted):
                return "fail"
        return "pass"
    except TimeoutError:
        return "timeout"
    except Exception:  # the solution has ended, or no rule takes what it returned
        return "fail"


def waited(solution: Solution, limit_s: float) -> tuple[float, bytes]:
    """(seconds, what it sent)"""
    started_s = time.monotonic()
    line = solution.receive(limit_s)
    return time.monotonic() - started_s, line


def start(work: Callable[[], str], limits: dict[str, int]) -> int:
    """The process of one check, whose exit status is the place of its status in STATUSES, or behind them."""
    if pid := os.fork():
        return pid
    code = len(STATUSES)
    try:
        held_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        memory_bytes = held_bytes + 2 * limits["memory_bytes"]  # what is expected, and what is returned
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"]))
        code = STATUSES.index(work())
    except SandboxError as error:
        print(error, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def run(
    checks: Sequence[Callable[[], str]], limits: dict[str, int], parallel: int
) -> Iterator[tuple[int, str]]:
    """(place in checks, status) as they end. SandboxError if a check could not be made."""
    waiting, running = list(enumerate(checks))[::-1], dict[int, int]()
    while waiting or running:
        while waiting and len(running) < parallel:
            place, work = waiting.pop()
            running[start(work, limits)] = place
        pid, how = os.wait()
        status = os.waitstatus_to_exitcode(how)
        if status >= len(STATUSES):
            raise SandboxError("a check could not be made; its reason stands above")
        yield running.pop(pid), STATUSES[status] if status >= 0 else "timeout"  # killed by its limits


def main(path: Path) -> None:
    """Print {"row", "tests", "status"} for each of the request's samples, [task, solution]."""
    request = json.loads(path.read_text())
    if request["sandbox"] and (process := probe(request)) != 2:
        raise SandboxError(
            f"the sandbox of a solution does not hold: it forks, or its process {process} is not 2"
        )
    lines = Path(request["problems"]).read_bytes().splitlines()
    problems = {p["task_id"]: p for p in map(json.loads, filter(None, lines))}
    expected = Expected(request, list(problems.values()))
    keys = [*itertools.product(range(len(request["samples"])), TESTS)]
    samples = [(*request["samples"][row], tests) for row, tests in keys]
    checks = [
        functools.partial(check, request, problems[task], expected, tests, code)
        for task, code, tests in samples
    ]
    for place, status in run(checks, request["limits"], request["parallel"]):
        row, tests = keys[place]
        print(json.dumps({"row": row, "tests": tests, "status": status}), flush=True)


def probe(request: Request) -> Any:
    solution = Solution(request, PROBE, "probe", [[]])
    solution.receive(60.0)
    process = read(solution.receive(60.0))
    solution.end()
    return process


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except SandboxError as error:
        sys.exit(str(error))
