"""`python -m tools.ablate configs/ablation.toml --out DIR`: what the delay and other joins cost in quality.

Trains every variant of the config on the same tokens, paired by seed, at every learning rate: all seeds of
the first rate, then of the next. Each run is a job of the shipped trainer in DIR/runs, and a line of
DIR/results.jsonl when it is over; after an interruption the same command goes on at the newest checkpoints.
Then DIR/report.json, table and figure: paired differences in validation loss with 95% t intervals. --report
makes only these, --plan only says what the runs would cost on a GPU.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress

from data_mixtures.mixture import Mixture
from records.files import append_line, code_version, hold_lock, read_lines, write_atomically
from tools.bench.harness import ROOT

from .figure import draw
from .page import ablation_section, put_section
from .plan import Options, Plan, price_section
from .report import Result, paired, read_results
from .trainer import runs_side_by_side, same_origin
from .training import Job, Training, run_job


def main() -> None:
    options = tyro.cli(Options, prog="python -m tools.ablate", description=__doc__)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # runs are to save, whoever ends this
    try:
        plan = Plan.read(options)
        if options.plan:
            Console().print(Markdown(price_section(plan, options.mfu, options.gpu_hour_price)))
            return
        path = options.out / "results.jsonl"
        if not options.report:
            with hold_lock(
                options.out / ".lock", f"another tools.ablate trains into {options.out}; choose another --out"
            ):
                train(list(plan.jobs()), plan.training, path, options.workers, options.keep_weights)
        finish(options, plan, path)
    except (ValueError, OSError) as error:
        raise SystemExit(f"tools.ablate: {error}") from None
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on from {options.out}/results.jsonl", file=sys.stderr)
        raise SystemExit(130) from None


def train(jobs: list[Job], training: Training, path: Path, workers: int, keep_weights: bool) -> None:
    """Run the jobs whose results the file does not hold; each result is a line at once.

    ValueError where the file's results come from another training or other data, and for a run that fails.
    """
    origin = {"training": dataclasses.asdict(training), "data": Mixture.open(training.lock).fingerprint}
    there = read_lines(path)
    check_origin(there, origin, path)
    possible = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    if training.device not in possible:
        raise ValueError(f"there is no device {training.device!r} here; choose from {possible}")
    done = [[r["size"], r["variant"], r["seed"], r["learning_rate"]] for r in there]
    left = [job for job in jobs if job.key not in done]
    origin["commit"] = code_version(ROOT)
    with Progress(console=Console(stderr=True)) as progress, runs_side_by_side(workers) as pool:
        task = progress.add_task(f"training runs -> {path}", total=len(jobs), completed=len(jobs) - len(left))
        for wave in ([job for job in left if not job.trunk], [job for job in left if job.trunk]):
            futures = [pool.submit(run_job, job, training, path.parent, keep_weights) for job in wave]
            for future in as_completed(futures):
                append_line(path, json.dumps({**future.result(), **origin, "time": time.time()}))
                progress.update(task, advance=1)


def check_origin(results: list[Result], origin: dict[str, Any], path: Path) -> None:
    """ValueError unless all results come from this training and these data."""
    data = {"data": origin["data"]}
    same_origin([{**data, **r, **r["training"]} for r in results], {**origin["training"], **data}, path)


def finish(options: Options, plan: Plan, path: Path) -> None:
    """Table, figure, report.json and, if asked for, the page of all results that there are."""
    results = read_results(path)
    if not results:
        raise ValueError(f"{path} holds no results yet")
    rows, figure = paired(results, plan.baseline), options.figure or options.out / "ablation.svg"
    write_atomically(
        options.out / "report.json", json.dumps({"baseline": plan.baseline, "rows": rows}, indent=1) + "\n"
    )
    for written in filter(None, (figure, options.page)):
        written.parent.mkdir(parents=True, exist_ok=True)
    draw(rows, figure)
    section = ablation_section(results, plan.baseline, figure, options.page)
    Console().print(Markdown(section))
    if options.page:
        put_section(options.page, section)
        write_atomically(options.page.with_suffix(".jsonl"), path.read_text(encoding="utf-8"))
    print(
        f"written: {options.out}/report.json, {figure}"
        + (f", {options.page} and .jsonl" if options.page else "")
    )


if __name__ == "__main__":
    main()
