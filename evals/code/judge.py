"""EvalPlus's evaluation, with EvalPlus's own Python, of solutions that each run in a sandbox of their own.

EvalPlus executes a solution in the process that holds the expected outputs and counts what is right. Here
that process calls a stand-in, which receives what the solution in its sandbox returns (evals/code/runner.py).
EvalPlus's own code then compares and keeps the time, on values of exact builtin types, where no solution has
run. The expected outputs come from the reference solutions in the same way. This file imports nothing of
ours: `python judge.py REQUEST.json`.
"""

from __future__ import annotations

import base64
import json
import multiprocessing
import os
import pickle
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

PROBE = """
import os
def probe():
    try:
        os.fork()
    except PermissionError:
        return os.getpid()
"""
# values that compare as their builtin type does but are not of it, as EvalPlus accepts
# NumPy's and collections'
BUILTIN = (int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
KINDS = {kind.__name__: type(kind.__name__, (kind,), {}) for kind in BUILTIN}
SCALARS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "complex": lambda parts: complex(*map(float.fromhex, parts)),
    "bytes": base64.b64decode,
    "Fraction": Fraction,
    "Decimal": Decimal,
}
COLLECTIONS: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}
KINDS["items"] = type(
    "items", (list,), {"__eq__": lambda *_: False}
)  # of other iterables: a set can be made of them


def like(kind: str, value: Any) -> Any:
    """The reading of what a solution returned that is not exactly of a builtin type."""
    return KINDS[kind](value) if kind in KINDS else object()


def plain(kind: str, value: Any) -> Any:
    """The reading of what a reference solution returned, which EvalPlus stores."""
    return object() if kind == "object" else value


def read(sent: Any, reading: Callable[[str, Any], Any]) -> Any:
    """The value that runner.py wrote as JSON: `plain` there. A solution may write anything, so this makes nothing
    but values of the types below. KeyError, TypeError or ValueError for what is none. reading: `like` or `plain`.
    """
    if isinstance(sent, list):
        return [read(item, reading) for item in sent]
    if not isinstance(sent, dict):
        return sent
    ((kind, held),) = sent.items()
    if kind == "like":
        return reading(held[0], read(held[1], reading))
    if kind in SCALARS:
        return SCALARS[kind](held)
    if kind == "dict":
        return {read(key, reading): read(value, reading) for key, value in held}
    return COLLECTIONS[kind](read(item, reading) for item in held)


class Solution:
    """A solution in its sandbox, which ends with the process that made it."""

    def __init__(
        self, request: dict[str, Any], code: str, entry_point: str, inputs: list[Any], reading: Any = like
    ):
        self.entry_point, self.reading = entry_point, reading
        with open(request["filter"], "rb") as rules:
            options = [*request["sandbox"], "--seccomp", str(rules.fileno())] if request["sandbox"] else []
            self.process = subprocess.Popen(
                [*options, *request["runner"]], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, pass_fds=[rules.fileno()],
            )  # fmt: skip
        job = {"code": code, "entry_point": entry_point, "inputs": inputs, "limits": request["limits"]}
        assert self.process.stdin is not None
        try:
            with self.process.stdin as pipe:
                pickle.dump(job, pipe)
            self.receive()
        except (OSError, EOFError):  # before any of its code ran: no score would mean anything
            print(f"a sandbox did not start: {shlex.join(options)}", file=sys.stderr, flush=True)
            os.killpg(0, signal.SIGKILL)

    def receive(self, *_: Any) -> Any:
        """The next value that it sends. EOFError if there is none, and what `read` raises."""
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise EOFError("the solution has ended")
        return read(json.loads(line), self.reading)

    def function(self) -> Callable[..., Any]:
        """What stands in for the solution's function, once that is defined."""
        self.receive()
        return self.receive


solution: Solution | None = None  # of this process, for STAND_IN
STAND_IN = "import __main__\nglobals()[__main__.solution.entry_point] = __main__.solution.function()"


def judged(execute: Callable[..., None], request: dict[str, Any]) -> Callable[..., None]:
    """EvalPlus's `unsafe_execute`, which runs in a process of its own, with a stand-in for the solution."""

    kill = os.kill  # EvalPlus takes it away

    def end(*_: Any) -> None:
        assert solution is not None
        kill(solution.process.pid, signal.SIGKILL)
        solution.process.wait()
        os._exit(0)

    def run(dataset: str, entry_point: str, code: str, inputs: list[Any], *rest: Any) -> None:
        global solution
        solution = Solution(request, code, entry_point, inputs)
        signal.signal(signal.SIGTERM, end)
        address_space_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit_bytes = (
            address_space_bytes + request["limits"]["memory_bytes"]
        )  # the expected outputs are inherited
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
        execute(dataset, entry_point, STAND_IN, inputs, *rest)
        end()

    return run


def outputs_of(request: dict[str, Any]) -> Callable[..., Any]:
    """EvalPlus's `trusted_exec`: what a reference solution returns, and the seconds for each input."""

    def run(
        code: str,
        inputs: list[Any],
        entry_point: str,
        record_time: bool = False,
        output_not_none: bool = False,
    ) -> Any:
        reference = Solution(request, code, entry_point, inputs, plain)
        function, outputs, seconds = reference.function(), [], []
        for _ in inputs:
            started = time.time()
            output = function()
            seconds.append(time.time() - started)
            outputs.append(output is not None if output_not_none else output)
        reference.process.kill()
        reference.process.wait()
        return (outputs, seconds) if record_time else outputs

    return run


def main() -> None:
    import evalplus.eval  # reads the data set's path from the environment when imported
    import evalplus.evaluate

    request = json.loads(Path(sys.argv[1]).read_text())
    if request["sandbox"] and (seen := Solution(request, PROBE, "probe", [[]]).function()()) != 2:
        raise RuntimeError(
            f"the sandbox of a solution does not hold: it forks, or its process {seen} is not 2"
        )
    multiprocessing.set_start_method("fork")  # what is replaced here is to hold in EvalPlus's workers
    evalplus.eval.query_maximum_memory_bytes = lambda: None
    evalplus.eval.unsafe_execute = judged(evalplus.eval.unsafe_execute, request)
    evalplus.evaluate.trusted_exec = outputs_of(request)
    evalplus.evaluate.evaluate(
        dataset=request["dataset"],
        samples=request["samples"],
        parallel=request["parallel"],
        min_time_limit=request["min_time_limit_s"],
        gt_time_limit_factor=10,  # the default fails right solutions on a slow machine
    )


if __name__ == "__main__":
    status = 1
    try:
        main()
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)  # EvalPlus leaves a thread that sleeps 20 s, or indefinitely after an error
