"""`python -m tools.ablate.mixtures configs/ablation.toml --out DIR`: what a mixture is worth beside another.

Trains one model of the config on each mixture with the same tokens, paired by seed, and compares the loss on the
same held-out text, in bits per byte of it. Each run is a job of the shipped trainer in DIR/runs and a line of
DIR/results.jsonl; after an interruption the same command goes on.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.markdown import Markdown

from data_mixtures.shards import tokenizer_path
from evals.bits_per_byte import bytes_per_token
from records.files import append_line, code_version, hold_lock, read_lines
from tools.bench.harness import ROOT
from tools.markdown import table
from train.validate import held_out

from .page import heading, put_section
from .plan import Options as AblateOptions
from .plan import Plan
from .report import Result, interval
from .training import Job, run_job


@dataclass
class Options:
    config: tyro.conf.Positional[Path]
    """The config of tools.ablate whose training, seeds, size and variant are taken."""
    out: Path
    """Folder of results.jsonl and runs."""
    locks: tuple[str, ...] = (
        "raw=data/crawl/phase1.lock.json",
        "steps=data/crawl-quality/phase1.lock.json",
    )
    """NAME=LOCK of each mixture; the others are compared with the first."""
    size: str = "0m5"
    variant: str = "delay_2"
    steps: int = 300
    """Steps of a run."""
    seeds: tuple[int, ...] = field(default=(0, 1, 2))
    report: bool = False
    """Train nothing; report what there is."""
    page: Path | None = None
    """Markdown page whose section about these results is to be written."""


def main(options: Options) -> None:
    locks = dict(each.split("=", 1) for each in options.locks)
    job = plan_of(options, "").training.job
    windows = {
        name: held_out(Path(lock), job["validation"]["windows_per_source"]) for name, lock in locks.items()
    }
    bits = bits_of_a_nat(windows, Path(next(iter(locks.values()))).parent)
    path = options.out / "results.jsonl"
    if not options.report:
        with hold_lock(options.out / ".lock", f"another process trains into {options.out}"):
            train(options, locks, path)
    section = section_of(read_lines(path), list(locks), bits, options)
    Console().print(Markdown(section))
    if options.page:
        put_section(options.page, section)


def plan_of(options: Options, lock: str) -> Plan:
    sizes, steps = (options.size,), options.steps
    return Plan.read(AblateOptions(options.config, options.out, sizes, lock=lock, steps=steps))


def bits_of_a_nat(windows: dict[str, Any], data: Path) -> float:
    """Bits per byte of one nat per token. ValueError unless all mixtures hold out the same windows."""
    first, *others = [np.concatenate([each[0] for each in held.values()]) for held in windows.values()]
    if not all(np.array_equal(first, each) for each in others):
        raise ValueError(
            f"{', '.join(windows)} hold out other windows; one tokenizer and one held-out source"
        )
    targets = first[:, 1:]
    return targets.size / bytes_per_token(tokenizer_path(data))[targets.astype(np.int64)].sum() / math.log(2)


def train(options: Options, locks: dict[str, str], path: Path) -> None:
    """The runs that the file does not hold yet, in turn by seed."""
    for seed in options.seeds:
        for name, lock in locks.items():
            plan = plan_of(options, lock)
            shape = {**plan.sizes[options.size], **plan.variants[options.variant]}
            job = Job(options.size, name, seed, plan.learning_rates[0], shape)
            if job.key not in [
                [r["size"], r["variant"], r["seed"], r["learning_rate"]] for r in read_lines(path)
            ]:
                found = run_job(job, replace(plan.training, lock=lock), options.out, keep_weights=False)
                said = {"commit": code_version(ROOT), "time": time.time(), "steps": options.steps}
                append_line(path, json.dumps({**found, **said}))


def section_of(results: Sequence[Result], names: list[str], bits: float, options: Options) -> str:
    by_run = {(r["variant"], r["seed"]): r["valid_loss"] * bits for r in results}
    rows = []
    for name in names:
        seeds = [seed for seed in options.seeds if (name, seed) in by_run and (names[0], seed) in by_run]
        own = [by_run[name, seed] for seed in seeds]
        row = [name, *(f"{each:.4f}" for each in own), f"{np.mean(own):.4f}"]
        if name != names[0] and len(seeds) > 1:
            mean, half, _ = interval([a - by_run[names[0], seed] for a, seed in zip(own, seeds, strict=True)])
            row += [f"{mean:+.4f} ± {half:.4f}"]
        rows.append([*row, ""][: len(options.seeds) + 3])
    head = ["mixture", *(f"seed {seed}" for seed in options.seeds), "mean", "difference, 95% t interval"]
    said = f"{results[0]['parameters']:,} parameters, {results[0]['tokens']:,} tokens a run, {options.steps} steps."
    title = heading(f"{options.size}, {options.variant}", "python -m tools.ablate.mixtures")
    return f"{title}\n\nBits per byte of held-out text. {said}\n\n{table(head, rows)}"


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m tools.ablate.mixtures", description=__doc__))
