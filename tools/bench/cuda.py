"""Everything to be measured of the GPU engine, in one call: correctness, then speed next to the memory's own.

    PYTHONPATH=models:. python3 -m tools.bench.cuda --out docs/benchmarks/DATE-gpu-decode.md

Needs Python with torch (CUDA), transformers and cuda-core, and this checkout; nothing is installed or built. The steps
run in a process of their own (tools.bench.cuda_worker), each within a time of its own, the most important ones first:
what crashes or hangs costs its step, and what no time is left for is named as not measured. The report is written anew
after every step. Speeds stand below the verdict of the correctness check. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import queue
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laneformer.config import FLAVORS
from laneformer.engine.device import why_no_cuda
from records.files import code_version, write_atomically
from tools.bench.cuda_report import markdown

ROOT = Path(__file__).resolve().parents[2]
RESERVE_S = 5.0  # to write the report
Report = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """A measurement, the least time that it makes sense to start it with, and the most it gets, both in seconds.

    `first_of`: the version whose first tokens these are; where they fail, no later step is to try it.
    """

    name: str
    least_s: float
    most_s: float
    first_of: str | None = None


STEPS = (
    Step("machine", 10, 60), Step("first_persistent", 15, 60, "persistent"), Step("first_graph", 15, 40, "graph"),
    Step("probe", 10, 60), Step("correctness", 40, 220), Step("decode", 10, 70),
    Step("rivals", 20, 80), Step("sweep", 20, 110), Step("prefill", 5, 30), Step("fp16", 20, 60),
    Step("lane_alone", 15, 50), Step("two_groups", 15, 50), Step("sanitizer", 20, 60), Step("compiled", 45, 120),
    Step("max_autotune", 90, 240),
)  # fmt: skip


class Worker:
    """The process that measures; started again after it has ended."""

    def __init__(self, command: Sequence[str]):
        self.command = list(command)
        self.process: subprocess.Popen[str] | None = None

    def ask(self, step: str, seconds: float) -> Report:
        """What a step answers, or the reason why it did not within its time."""
        process, answers = self._running()
        try:
            process.stdin.write(f"{step} {seconds}\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            answer = answers.get(timeout=seconds)
        except queue.Empty:
            self.close()
            return {"error": f"no answer within {seconds:.0f} s; its process was ended"}
        except BrokenPipeError:
            answer = None
        if answer is None:
            status = process.wait()
            self.close()
            return {"error": f"its process ended with status {status}"}
        found: Report = json.loads(answer)
        if found.pop("ends", False):
            self.close()
        return found

    def leave_out(self, version: str) -> None:
        """From now on the process is one that does not try this version."""
        self.close()
        self.command += ["--without", version]

    def _running(self) -> tuple[subprocess.Popen[str], queue.Queue[str | None]]:
        if self.process is None or self.process.poll() is not None:
            self.close()
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(self.command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
            self.answers: queue.Queue[str | None] = queue.Queue()
            threading.Thread(target=forward, args=(self.process, self.answers), daemon=True).start()
        return self.process, self.answers

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def forward(process: subprocess.Popen[str], answers: queue.Queue[str | None]) -> None:
    """Lines of the process, then None."""
    for line in process.stdout or ():
        answers.put(line)
    answers.put(None)


def measure(
    steps: Sequence[Step], worker: Worker, total_s: float, save: Callable[[Report], None],
    clock: Callable[[], float] = time.monotonic,
) -> Report:  # fmt: skip
    """Every step within its time and the whole; {step: {"result"}, {"error"} or {"not_measured"}}, saved after each."""
    end = clock() + total_s - RESERVE_S
    done: Report = {}
    for step in steps:
        left = end - clock()
        if left < step.least_s:
            done[step.name] = {"not_measured": f"{max(0, left):.0f} s were left, it needs {step.least_s:.0f}"}
        else:
            print(f"{step.name}, {left:.0f} s left", file=sys.stderr, flush=True)
            start = clock()
            done[step.name] = worker.ask(step.name, min(left, step.most_s))
            if step.first_of and "result" not in done[step.name]:
                worker.leave_out(step.first_of)
            done[step.name]["seconds"] = round(clock() - start, 1)
        save(done)
    return done


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--json", type=Path, help="JSON file to write, with every figure")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything together")
    parser.add_argument("--flavor", choices=sorted(FLAVORS), default="2b", help="the shape; weights are random")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--runs", type=int, default=100, help="repeated runs that must agree to the bit")
    parser.add_argument("--steps", help=f"only these, with commas between: {','.join(s.name for s in STEPS)}")
    parser.add_argument("--commit", help="of this code, where the checkout has no .git")
    return parser.parse_args(arguments)


def chosen_steps(names: str | None) -> list[Step]:
    """ValueError names what is unknown."""
    wanted = names.split(",") if names else [step.name for step in STEPS]
    known = [step.name for step in STEPS]
    for name in wanted:
        if name not in known:
            raise ValueError(f"unknown step {name!r}; choose from {known}")
    return [step for step in STEPS if step.name in wanted]


def check_machine() -> None:
    """ValueError where nothing can be measured, with what is missing."""
    if reason := why_no_cuda():
        raise ValueError(f"{reason}. On a CPU, python -m tools.bench.decode measures the CPU engine")
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("transformers, the reference, cannot be imported: pip install transformers")


def main(arguments: list[str] | None = None) -> None:
    options = options_of(arguments)
    try:
        steps = chosen_steps(options.steps)
        check_machine()
    except ValueError as error:
        print(f"bench_cuda: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    command = ["python", "-m", "tools.bench.cuda", *(sys.argv[1:] if arguments is None else arguments)]
    report: Report = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(command), "commit": options.commit or code_version(ROOT),
        "flavor": options.flavor, "dtype": options.dtype, "steps": {},
    }  # fmt: skip

    def save(done: Report) -> None:
        report["steps"] = done
        for path, text in ((options.out, markdown(report)), (options.json, json.dumps(report, indent=1) + "\n")):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, text)

    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "models"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    flags = ["--flavor", options.flavor, "--dtype", options.dtype, "--runs", str(options.runs)]
    worker = Worker([sys.executable, "-m", "tools.bench.cuda_worker", *flags])
    try:
        measure(steps, worker, 60 * options.minutes, save)
    finally:
        worker.close()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
