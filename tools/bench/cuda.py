"""Everything to measure of the CUDA engine, in one call: correctness first, then speeds
beside the read bandwidth.

    PYTHONPATH=models:. python3 -m tools.bench cuda --out docs/benchmarks/DATE-gpu-decode.md

Needs Python with torch (CUDA), transformers, cuda-bindings and NVRTC, and this checkout; nothing is installed
or built. The steps run in a process of their own (tools.bench.cuda_steps), each within its own time limit,
the most important ones first: a crash or a hang costs only its step, and a step that no time is left for is
reported as not measured. The report is written after every step. Speeds stand below the verdict of the
correctness check. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from laneformer.config import FLAVORS
from laneformer.engine.device import why_no_cuda
from records.files import write_atomically
from tools.bench.cuda_report import RESERVE_S, RUN_MINUTES, STEPS, Step, markdown
from tools.bench.harness import Candidate, NoAnswer, Result, stamp

KEPT = Path("build/bench-cuda.json")
MAX_SHARES = (
    3  # of its limit that a step may take of what those before it have left over; the rest is for the others
)


def measure(
    steps: Sequence[Step], worker: Any, total_s: float, save: Callable[[Result], None],
    clock: Callable[[], float] = time.monotonic, kept: Result | None = None,
) -> Result:  # fmt: skip
    """{step: {"result"}, {"error"} or {"not_measured"}}, saved after each; none takes the time
    of those after it.

    `kept`: of a run before; what has a result there is not measured again.
    """
    end = clock() + total_s - RESERVE_S
    done: Result = {name: step for name, step in (kept or {}).items() if "result" in step}
    to_do = [step for step in steps if step.name not in done]
    for index, step in enumerate(to_do):
        start = clock()
        left = end - start
        if left < step.min_s:
            done[step.name] = {"not_measured": f"{max(0, left):.0f} s were left, it needs {step.min_s:.0f}"}
        else:
            print(f"{step.name}, {left:.0f} s left", file=sys.stderr, flush=True)
            spare = left - sum(later.max_s for later in to_do[index + 1 :])
            limit = min(left, max(step.max_s, min(spare, MAX_SHARES * step.max_s)))
            try:
                done[step.name] = {"result": worker.ask(step.name, timeout_s=limit, seconds=limit)}
            except RuntimeError as error:
                done[step.name] = {"error": str(error)}
                if step.first_of and not isinstance(error, NoAnswer):  # what is late may be slow to compile
                    worker.close()
                    worker.command.append(step.first_of)
            done[step.name]["seconds"] = round(clock() - start, 1)
        save(done)
    return done


def options_of(arguments: list[str]) -> argparse.Namespace:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tools.bench cuda", description=__doc__, formatter_class=about)
    add = parser.add_argument
    add("--out", type=Path, help="Markdown file to write")
    add(
        "--json",
        type=Path,
        default=KEPT,
        help=f"JSON file with every figure, which an interrupted run goes on with (default {KEPT})",
    )
    add(
        "--minutes",
        type=float,
        default=RUN_MINUTES,
        help=f"time limit of the whole run (default {RUN_MINUTES:g})",
    )
    add("--flavor", choices=sorted(FLAVORS), default="2b", help="shape of the model; weights are random")
    add("--dtype", choices=("bf16", "fp16"), default="bf16", help="element type of the weights")
    add("--runs", type=int, default=100, help="repeated runs that must be bit-identical (default 100)")
    add("--steps", help=f"comma-separated steps to run, of {','.join(step.name for step in STEPS)}")
    add(
        "--bundle",
        type=Path,
        help="pack this file for a bare machine instead (tools/bench/bundle.py); needs no GPU",
    )
    add("--commit", help="commit of this code, for a checkout without .git")
    return parser.parse_args(arguments)


def chosen_steps(names: str | None) -> list[Step]:
    """ValueError for an unknown name."""
    known = [step.name for step in STEPS]
    wanted = names.split(",") if names else known
    for name in wanted:
        if name not in known:
            raise ValueError(f"unknown step {name!r}; choose from {known}")
    return [step for step in STEPS if step.name in wanted]


def kept_steps(path: Path, report: Result) -> Result:
    """The steps of an unfinished run of the same command, code and GPU; none of them is lost."""
    try:
        before = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    same = all(before.get(key) == report[key] for key in ("command", "commit", "gpu"))
    finished = all("result" in step for step in before["steps"].values())
    if not same or (finished and before["finished"]):
        return {}
    print(f"going on with what {path} has; remove it to measure anew", file=sys.stderr)
    return dict(before["steps"])


def main(arguments: list[str]) -> None:
    options = options_of(arguments)
    if options.bundle:
        from tools.bench import bundle  # needs what a GPU's machine may lack

        return bundle.main(options.bundle, options)
    try:
        steps = chosen_steps(options.steps)
        if reason := why_no_cuda():
            raise ValueError(f"{reason}. On a CPU, python -m tools.bench decode measures the CPU engine")
        if importlib.util.find_spec("transformers") is None:
            raise ValueError("transformers, the reference, cannot be imported: pip install transformers")
    except ValueError as error:
        print(f"cuda: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    report = stamp("cuda", arguments)
    report["commit"] = options.commit or report["commit"]
    report |= {
        "flavor": options.flavor,
        "dtype": options.dtype,
        "gpu": gpu_name(),
        "steps": {},
        "finished": False,
    }
    kept = kept_steps(options.json, report)

    def save(done: Result) -> None:
        report["steps"], report["finished"] = done, all(step.name in done for step in steps)
        for path, text in (
            (options.out, markdown(report)),
            (options.json, json.dumps(report, indent=1) + "\n"),
        ):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, text)

    session = [options.flavor, options.dtype, str(options.runs)]
    worker = Candidate("the CUDA engine", ["-m", "tools.bench.cuda_steps", *session], quiet=False)
    try:
        measure(steps, worker, 60 * options.minutes, save, kept=kept)
    finally:
        worker.close()
    print(json.dumps(report))


def gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name(0)
