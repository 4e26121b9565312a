"""Compare the quality of variants of the model: `python -m tools.ablate configs/ablation.toml --out runs/ablation`.

A variant is a line of the trainer's flags, trained on every seed as a job in OUT/runs/VARIANT-SEED, whose result is a
line of OUT/results.jsonl. The last validation losses are compared in pairs of one seed. After an interruption, the
same command continues. Other options are passed to the trainer in every run: `--training.steps 300`.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

import tomli
import tyro
from rich.console import Console
from rich.progress import Progress

from data_mixtures.mixture import Mixture
from data_mixtures.recipe import check_known
from records.command import (
    Count,
    Natural,
    check_ranges,
    refuse_unknown_options,
    run_command,
)
from records.events import BAD_STEP, DONE
from records.files import (
    append_line,
    code_version,
    hold_lock,
    read_json,
    read_lines,
    write_json,
)
from records.job import read_job, read_sections
from tools import ROOT
from tools.markdown import table

POLL_S = 0.2
# of the end of the log of a run that has failed
ERROR_CHARS = 2000


@dataclass
class Options:
    config: tyro.conf.Positional[Path]
    """The variants, the baseline, the seeds and the job file that they share (TOML)."""
    out: Path
    """Folder of results.jsonl and runs."""
    variants: tuple[str, ...] = ()
    """Variants of the config; default: all."""
    seeds: tuple[Natural, ...] = ()
    """Default: the config's; more of them add to the results that are there."""
    workers: Count = 2
    """Runs side by side, of one thread each on a CPU."""
    keep_checkpoints: bool = False
    """Keep the checkpoints of runs that have ended, for tools.export_hf."""


@dataclass(frozen=True)
class Plan:
    job: str
    baseline: str
    seeds: Sequence[int]
    # flags of the trainer
    variants: dict[str, str]


@dataclass(frozen=True)
class Run:
    variant: str
    seed: int
    folder: Path
    flags: list[str]


def main() -> None:
    options, shared = tyro.cli(
        Options, prog="python -m tools.ablate", description=__doc__, return_unknown_args=True
    )
    check_ranges(Options, vars(options))
    results, plan = options.out / "results.jsonl", read_plan(options)
    # two commands would start the same runs
    busy = f"another tools.ablate trains into {options.out}; choose another --out"
    with hold_lock(options.out / ".lock", busy):
        runs = plan_runs(plan, options.out, shared)
        check_settings(options.out / "settings.json", settings_of(plan, runs, shared))
        train(runs, results, options.workers, options.keep_checkpoints)
    print(compare(read_lines(results), plan.baseline))


def read_plan(options: Options) -> Plan:
    """Read the plan; ValueError for errors of the file or the options."""
    path = options.config
    values = tomli.loads(path.read_text(encoding="utf-8"))
    keys = [field.name for field in fields(Plan)]
    check_known(f"key of {path}", values, keys)
    if missing := sorted({*keys} - values.keys()):
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    variants = values["variants"]
    check_known("name for --variants:", options.variants, variants)
    check_known("baseline", [values["baseline"]], variants)
    return Plan(
        job=values["job"],
        baseline=values["baseline"],
        seeds=list(dict.fromkeys(options.seeds or values["seeds"])),
        variants={name: variants[name] for name in options.variants or variants},
    )


def plan_runs(plan: Plan, out: Path, shared: Sequence[str]) -> list[Run]:
    """Return all variants of one seed after those of another; ValueError for an unknown option."""
    refuse_unknown_options(shared)
    job = ["--job.config_file", plan.job, *shared]
    training = read_job(job).training
    windows = training.steps * training.global_batch_size
    runs = []
    for seed in plan.seeds:
        # a seed trains on the windows after those of smaller seeds
        skip = ["--resilience.skip_sequences", "0", str(seed * windows)] if seed else []
        for variant, words in plan.variants.items():
            folder = out / "runs" / f"{variant}-{seed}"
            # a tensor's initial numbers depend on its name and the seed, so variants begin equal
            variant_flags = shlex.split(words.replace("{seed}", str(seed)))
            place = ["--job.dump_folder", str(folder), "--debug.seed", str(seed)]
            runs.append(Run(variant, seed, folder, [*job, *place, *skip, *variant_flags]))
    return runs


def settings_of(plan: Plan, runs: Sequence[Run], shared: Sequence[str]) -> dict[str, Any]:
    """Return what results must share to be compared, and the flags of each variant."""
    lock = read_job(runs[0].flags).mixture.lock
    return {
        "job": read_sections(Path(plan.job)),
        "flags": list(shared),
        "data": Mixture.open(lock).fingerprint,
        **{f"variant {name}": words for name, words in plan.variants.items()},
    }


def check_settings(path: Path, settings: dict[str, Any]) -> None:
    """Write a folder's settings or add variants; ValueError where the folder has others."""
    # results of other data or another job cannot be compared with those that are there
    before = read_json(path, missing={})
    for name, value in settings.items():
        if before.get(name, value) != value:
            raise ValueError(f"{path} has another {name}; choose another --out")
    write_json(path, before | settings)


def train(runs: Sequence[Run], results: Path, workers: int, keep_checkpoints: bool) -> None:
    """Train the runs without a line in `results`, and append theirs.

    If one fails or this is interrupted, no other begins and those under way save and end.
    ValueError for a run that fails.
    """
    finished = {(row["variant"], row["seed"]) for row in read_lines(results)}
    waiting = [run for run in runs if (run.variant, run.seed) not in finished]
    # once: the checkout may change while the runs train
    commit = code_version(ROOT)
    running: list[tuple[Run, subprocess.Popen[bytes]]] = []
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task(
            f"runs -> {results}", total=len(runs), completed=len(runs) - len(waiting)
        )
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    run = waiting.pop(0)
                    running.append((run, start(run)))
                time.sleep(POLL_S)
                for run, process in [pair for pair in running if pair[1].poll() is not None]:
                    running.remove((run, process))
                    result = read_result(run, process.returncode)
                    append_line(
                        results, json.dumps(result | {"commit": commit, "time": time.time()})
                    )
                    if not keep_checkpoints:
                        shutil.rmtree(run.folder / "checkpoint", ignore_errors=True)
                    progress.advance(bar)
        finally:
            # all at once, then wait: each trainer saves a checkpoint first
            for _, process in running:
                process.terminate()
            for _, process in running:
                process.wait()


def start(run: Run) -> subprocess.Popen[bytes]:
    """Start the trainer as the only rank of a job; it resumes from its newest checkpoint."""
    run.folder.mkdir(parents=True, exist_ok=True)
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    # 0: any free port, as no other rank asks for it
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    with open(run.folder / "train.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "train", *run.flags],
            env={"OMP_NUM_THREADS": "1", **os.environ, **rank, **place},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Ctrl-C is for this command, which passes it on once
            start_new_session=True,
        )


def read_result(run: Run, code: int) -> dict[str, Any]:
    """Return the line of an ended run, without a loss if it diverged; ValueError if it failed."""
    if code not in (DONE, BAD_STEP):
        log = run.folder / "train.log"
        end = log.read_text(encoding="utf-8", errors="replace")[-ERROR_CHARS:]
        raise ValueError(f"{run.folder} ended with exit status {code}; {log} ends:\n{end}")
    last = (read_lines(run.folder / "metrics.jsonl") or [{}])[-1]
    return {
        "variant": run.variant,
        "seed": run.seed,
        "valid_loss": last["valid_loss"] if code == DONE else None,
        "train_loss": last.get("loss"),
        "seconds": 3600 * last.get("gpu_hours", 0.0),
        "flags": run.flags,
    }


def compare(rows: Sequence[dict[str, Any]], baseline: str) -> str:
    """Compare every variant with the baseline on the seeds both have; return a Markdown table.

    ±: half of the 95% t interval of the paired differences; p: of the paired t test.
    ValueError without results of the baseline.
    """
    from scipy.stats import ttest_rel

    losses: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        # None of a run that diverged, which loses every comparison
        loss = row["valid_loss"]
        losses[row["variant"]][row["seed"]] = math.inf if loss is None else loss
    if baseline not in losses:
        raise ValueError(f"there are no results of {baseline}, the baseline, yet; train it")
    # in pairs of one seed: the data and the initial weights, which vary most, cancel out
    lines = []
    for variant, by_seed in losses.items():
        seeds = sorted(by_seed.keys() & losses[baseline].keys())
        changed, base = ([of[seed] for seed in seeds] for of in (by_seed, losses[baseline]))
        difference = half = p = "-"
        if variant != baseline and seeds:
            difference = f"{fmean(changed) - fmean(base):+.4f}"
            if len(seeds) > 1 and all(map(math.isfinite, changed + base)):
                test = ttest_rel(changed, base)
                interval = test.confidence_interval(0.95)
                half, p = f"{(interval.high - interval.low) / 2:.4f}", f"{test.pvalue:.4f}"
        loss = f"{fmean(changed):.4f}" if seeds else "-"
        lines.append((variant, len(seeds), loss, difference, half, p))
    return table(("variant", "seeds", "validation loss", "difference", "±", "p"), lines)


if __name__ == "__main__":
    run_command("tools.ablate", main, interrupted="interrupted; the same command goes on")
