"""`python -m tools.ablate configs/ablation.toml --out DIR`: what the delay and other joins cost in quality.

Trains every variant of the config on the same tokens, paired by seed: three learning rates on the first seed, the best
one on the others. Results are lines of DIR/results.jsonl; a run that was interrupted goes on where it stopped. Then
DIR/report.json, table and plot: paired differences in validation loss with 95% t intervals. --report makes only these.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli
import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from records.files import append_line, read_lines, write_atomically

from .report import best_rates, paired, plot
from .training import Job, Training, run_job

KEYS = ("baseline", "seeds", "learning_rates", "training", "sizes", "variants")


@dataclass
class Options:
    config: tyro.conf.Positional[Path]
    """The variants, sizes, seeds and the training that they share (TOML)."""
    out: Path
    """Folder of results.jsonl, report.json and the plot."""
    sizes: tuple[str, ...] = ("1m",)
    """Sizes of the config to train."""
    variants: tuple[str, ...] = ()
    """Variants of the config; default: all."""
    workers: int = 2
    """Runs side by side, one thread each on a CPU."""
    device: str | None = None
    """cpu or cuda; default: the config's."""
    report: bool = False
    """Train nothing; report what there is."""


@dataclass(frozen=True)
class Plan:
    """The config of an ablation, checked."""

    baseline: str
    seeds: list[int]
    learning_rates: list[float]
    training: Training
    sizes: dict[str, dict[str, Any]]
    variants: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, options: Options) -> Plan:
        """ValueError for what the file or the options get wrong."""
        values = tomli.loads(options.config.read_text(encoding="utf-8"))
        if unknown := [key for key in values if key not in KEYS] + [key for key in KEYS if key not in values]:
            raise ValueError(f"{options.config}: {unknown[0]!r} is unknown or missing; the keys are {', '.join(KEYS)}")
        known = {field.name for field in dataclasses.fields(Training)}
        if unknown := [key for key in values["training"] if key not in known]:
            raise ValueError(f"{options.config}: [training] has no {unknown[0]!r}; choose from {sorted(known)}")
        shared = values["training"] | ({"device": options.device} if options.device else {})
        sizes = chosen("size", options.sizes, values["sizes"])
        variants = chosen("variant", options.variants or tuple(values["variants"]), values["variants"])
        if values["baseline"] not in variants:
            raise ValueError(f"the baseline {values['baseline']!r} is not among the variants {', '.join(variants)}")
        return cls(values["baseline"], values["seeds"], values["learning_rates"], Training(**shared), sizes, variants)

    def job(self, size: str, variant: str, seed: int, rate: float) -> Job:
        own = dict(self.variants[variant])
        joins, offset = own.pop("joins", None), own.pop("seed_offset", 0)
        return Job(size, variant, seed, rate, {**self.sizes[size], **own}, joins, offset)

    def sweep(self) -> Iterator[Job]:
        """Every learning rate on the first seed."""
        for size in self.sizes:
            for rate in self.learning_rates:
                yield from (self.job(size, variant, self.seeds[0], rate) for variant in self.variants)

    def seeded(self, rates: dict[tuple[str, str], float]) -> Iterator[Job]:
        """The best rates on the other seeds."""
        for seed in self.seeds[1:]:
            for size in self.sizes:
                yield from (self.job(size, variant, seed, rates[size, variant]) for variant in self.variants)


def chosen(what: str, names: tuple[str, ...], known: dict[str, Any]) -> dict[str, Any]:
    for name in names:
        if name not in known:
            raise ValueError(f"no {what} {name!r}; choose from {', '.join(known)}")
    return {name: known[name] for name in names}


def main() -> None:
    options = tyro.cli(Options, prog="python -m tools.ablate", description=__doc__)
    try:
        plan = Plan.read(options)
        path = options.out / "results.jsonl"
        if not options.report:
            train(list(plan.sweep()), plan.training, path, options.workers)
            train(list(plan.seeded(best_rates(read_lines(path)))), plan.training, path, options.workers)
        finish(options.out, plan)
    except (ValueError, OSError) as error:
        raise SystemExit(f"tools.ablate: {error}") from None
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on from {options.out}/results.jsonl", file=sys.stderr)
        raise SystemExit(130) from None


def train(jobs: list[Job], training: Training, path: Path, workers: int) -> None:
    """Run the jobs whose results the file does not hold; each result is a line at once.

    ValueError where the file's results come from another training.
    """
    shared = {**dataclasses.asdict(training), "betas": list(training.betas)}
    there = read_lines(path) if path.exists() else []
    if other := next((r for r in there if r["training"] != shared), None):
        differing = [name for name in shared if other["training"].get(name) != shared[name]]
        raise ValueError(f"{path} holds results of another training ({', '.join(differing)}); choose another --out")
    done = [[r["size"], r["variant"], r["seed"], r["learning_rate"]] for r in there]
    left = [job for job in jobs if job.key not in done]
    context = multiprocessing.get_context("spawn")
    with Progress(console=Console(stderr=True)) as progress, ProcessPoolExecutor(workers, context) as pool:
        task = progress.add_task(f"training runs -> {path}", total=len(jobs), completed=len(jobs) - len(left))
        futures = [pool.submit(run_job, job, training) for job in left]
        try:
            for future in as_completed(futures):
                result = {**future.result(), "training": shared, "time": time.time()}
                append_line(path, json.dumps(result))
                progress.update(task, advance=1)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def finish(out: Path, plan: Plan) -> None:
    """Table, report.json and differences.svg of all results that there are."""
    rows = paired(read_lines(out / "results.jsonl"), plan.baseline)
    write_atomically(out / "report.json", json.dumps({"baseline": plan.baseline, "rows": rows}, indent=1) + "\n")
    plot(rows, plan.baseline, out / "differences.svg")
    table = Table(*rows[0], title=f"validation loss against {plan.baseline}, paired by seed") if rows else Table()
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
    print(f"written: {out}/report.json, {out}/differences.svg")


if __name__ == "__main__":
    main()
