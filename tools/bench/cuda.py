"""Everything to measure of the CUDA engine, in one call: correctness first, then speeds beside the read bandwidth.

    PYTHONPATH=models:. python3 -m tools.bench cuda --out docs/benchmarks/DATE-gpu-decode.md

Needs Python with torch (CUDA), transformers and cuda-core, and this checkout; nothing is installed or built. The steps
run in a process of their own (tools.bench.cuda_steps), each within its own time limit, the most important ones first: a
crash or a hang costs only its step, and a step that no time is left for is reported as not measured. The report is
written after every step. Speeds stand below the verdict of the correctness check. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laneformer.config import FLAVORS
from laneformer.engine.device import why_no_cuda
from records.files import code_version, write_atomically
from tools.bench.cuda_report import markdown
from tools.bench.harness import ROOT, Candidate, Result, command_line

RESERVE_S = 5.0  # to write the report


@dataclass(frozen=True)
class Step:
    """A measurement, the least time that makes it worth starting, and its limit, both in seconds.

    `first_of`: the version whose first tokens these are; if they fail, no later step tries it.
    """

    name: str
    least_s: float
    most_s: float
    first_of: str | None = None


STEPS = (
    Step("machine", 10, 60), Step("first_persistent", 15, 60, "persistent"), Step("first_graph", 15, 40, "graph"),
    Step("probe", 10, 60), Step("correctness", 40, 220), Step("decode", 10, 90), Step("baselines", 20, 80),
    Step("fp16", 20, 60), Step("lane_alone", 15, 50), Step("sanitizer", 20, 60),
    Step("compiled", 45, 120),
)  # fmt: skip


def measure(
    steps: Sequence[Step], worker: Any, total_s: float, save: Callable[[Result], None],
    clock: Callable[[], float] = time.monotonic,
) -> Result:  # fmt: skip
    """{step: {"result"}, {"error"} or {"not_measured"}}, saved after each; no step exceeds its limit."""
    end = clock() + total_s - RESERVE_S
    done: Result = {}
    for step in steps:
        start = clock()
        left = end - start
        if left < step.least_s:
            done[step.name] = {"not_measured": f"{max(0, left):.0f} s were left, it needs {step.least_s:.0f}"}
        else:
            print(f"{step.name}, {left:.0f} s left", file=sys.stderr, flush=True)
            limit = min(left, step.most_s)
            try:
                done[step.name] = {"result": worker.ask(step.name, timeout_s=limit, seconds=limit)}
            except RuntimeError as error:
                done[step.name] = {"error": str(error)}
                if step.first_of:
                    worker.close()
                    worker.command += ["--without", step.first_of]
            done[step.name]["seconds"] = round(clock() - start, 1)
        save(done)
    return done


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tools.bench cuda", description=__doc__, formatter_class=about)
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--json", type=Path, help="JSON file to write, with every figure")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of the whole run (default 9)")
    parser.add_argument(
        "--flavor", choices=sorted(FLAVORS), default="2b", help="shape of the model; weights are random"
    )
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16", help="element type of the weights")
    parser.add_argument("--runs", type=int, default=100, help="repeated runs that must be bit-identical (default 100)")
    parser.add_argument("--steps", help=f"comma-separated steps to run, of {','.join(step.name for step in STEPS)}")
    parser.add_argument("--commit", help="commit of this code, for a checkout without .git")
    return parser.parse_args(arguments)


def chosen_steps(names: str | None) -> list[Step]:
    """ValueError for an unknown name."""
    known = [step.name for step in STEPS]
    wanted = names.split(",") if names else known
    for name in wanted:
        if name not in known:
            raise ValueError(f"unknown step {name!r}; choose from {known}")
    return [step for step in STEPS if step.name in wanted]


def check_machine() -> None:
    """ValueError with what is missing where nothing can be measured."""
    if reason := why_no_cuda():
        raise ValueError(f"{reason}. On a CPU, python -m tools.bench decode measures the CPU engine")
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("transformers, the reference, cannot be imported: pip install transformers")


def main(arguments: list[str] | None = None) -> None:
    options = options_of(arguments)
    try:
        steps = chosen_steps(options.steps)
        check_machine()
    except ValueError as error:
        print(f"cuda: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    report: Result = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command_line("cuda", arguments), "commit": options.commit or code_version(ROOT),
        "flavor": options.flavor, "dtype": options.dtype, "steps": {},
    }  # fmt: skip

    def save(done: Result) -> None:
        report["steps"] = done
        for path, text in ((options.out, markdown(report)), (options.json, json.dumps(report, indent=1) + "\n")):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, text)

    command = ["-m", "tools.bench.cuda_steps", "--flavor", options.flavor, "--dtype", options.dtype]
    worker = Candidate("the CUDA engine", [*command, "--runs", str(options.runs)], quiet=False)
    try:
        measure(steps, worker, 60 * options.minutes, save)
    finally:
        worker.close()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
