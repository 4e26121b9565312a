"""`python -m tools.ablate configs/ablation.toml --out DIR`: what the delay and other joins cost in quality.

Trains every variant of the config on the same tokens, paired by seed, at every learning rate: all seeds of the first
rate, then of the next. Results are lines of DIR/results.jsonl; a run that was interrupted goes on where it stopped.
Then DIR/report.json, table and figure: paired differences in validation loss with 95% t intervals. --report makes only
these, --plan only says what the runs would cost on a GPU.
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
from rich.markdown import Markdown
from rich.progress import Progress

from records.files import append_line, code_version, read_lines, write_atomically
from tools.bench.harness import ROOT

from .figure import draw
from .page import ablation_section, put_section
from .price import price_section
from .report import paired, read_results
from .training import Job, Training, run_job

KEYS = ("baseline", "seeds", "learning_rates", "training", "sizes", "variants")


@dataclass
class Options:
    config: tyro.conf.Positional[Path]
    """The variants, sizes, seeds and the training that they share (TOML)."""
    out: Path
    """Folder of results.jsonl, report.json and ablation.svg."""
    sizes: tuple[str, ...] = ("1m",)
    """Sizes of the config to train."""
    variants: tuple[str, ...] = ()
    """Variants of the config; default: all."""
    workers: int = 2
    """Runs side by side, one thread each on a CPU."""
    device: str | None = None
    """cpu or cuda; default: the config's. With cuda its [training.cuda] goes before [training]."""
    lock: str | None = None
    """The mixture; default: the config's."""
    steps: int | None = None
    """Steps of a run; default: the config's."""
    keep_weights: bool = False
    """Keep a model folder of each run in OUT/weights, for tools.ablate.diagnose."""
    report: bool = False
    """Train nothing; report what there is."""
    page: Path | None = None
    """Markdown page whose section about these results is to be written, and docs/images/ablation.svg with it."""
    figure: Path | None = None
    """Where the figure goes; default: OUT/ablation.svg."""
    plan: bool = False
    """Train nothing; print hours and price of the runs on one H100, by calculation."""
    mfu: float = 10.0
    """For --plan: the assumed share of the GPU's dense BF16 FLOPs, in percent."""
    gpu_hour_price: float = 3.0
    """For --plan: the assumed price of a GPU-hour, in USD."""


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
        on_cuda = values["training"].pop("cuda", {})
        known = {field.name for field in dataclasses.fields(Training)}
        if unknown := [key for key in (*values["training"], *on_cuda) if key not in known]:
            raise ValueError(f"{options.config}: [training] has no {unknown[0]!r}; choose from {sorted(known)}")
        shared = values["training"] | (on_cuda if options.device == "cuda" else {})
        given = {"device": options.device, "lock": options.lock, "steps": options.steps}
        shared |= {key: value for key, value in given.items() if value is not None}
        sizes = chosen("size", options.sizes, values["sizes"])
        variants = chosen("variant", options.variants or tuple(values["variants"]), values["variants"])
        if values["baseline"] not in variants:
            raise ValueError(f"the baseline {values['baseline']!r} is not among the variants {', '.join(variants)}")
        return cls(values["baseline"], values["seeds"], values["learning_rates"], Training(**shared), sizes, variants)

    def job(self, size: str, variant: str, seed: int, rate: float) -> Job:
        own = dict(self.variants[variant])
        joins, offset = own.pop("joins", None), own.pop("seed_offset", 0)
        return Job(size, variant, seed, rate, {**self.sizes[size], **own}, joins, offset)

    def jobs(self) -> Iterator[Job]:
        """Every learning rate on every seed; a rate chosen on one seed would be chosen by that seed's luck."""
        for size in self.sizes:
            for rate in self.learning_rates:
                for seed in self.seeds:
                    yield from (self.job(size, variant, seed, rate) for variant in self.variants)


def chosen(what: str, names: tuple[str, ...], known: dict[str, Any]) -> dict[str, Any]:
    for name in names:
        if name not in known:
            raise ValueError(f"no {what} {name!r}; choose from {', '.join(known)}")
    return {name: known[name] for name in names}


def main() -> None:
    options = tyro.cli(Options, prog="python -m tools.ablate", description=__doc__)
    try:
        plan = Plan.read(options)
        if options.plan:
            Console().print(Markdown(price_section(plan, options.mfu, options.gpu_hour_price)))
            return
        path = options.out / "results.jsonl"
        if not options.report:
            weights = options.out / "weights" if options.keep_weights else None
            train(list(plan.jobs()), plan.training, path, options.workers, weights)
        finish(options, plan, path)
    except (ValueError, OSError) as error:
        raise SystemExit(f"tools.ablate: {error}") from None
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on from {options.out}/results.jsonl", file=sys.stderr)
        raise SystemExit(130) from None


def train(jobs: list[Job], training: Training, path: Path, workers: int, weights: Path | None) -> None:
    """Run the jobs whose results the file does not hold; each result is a line at once.

    ValueError where the file's results come from another training.
    """
    there, shared = read_lines(path), dataclasses.asdict(training)
    others = (dataclasses.asdict(Training.of_result(r["training"])) for r in there)
    if other := next((other for other in others if other != shared), None):
        differing = [name for name in shared if other[name] != shared[name]]
        raise ValueError(f"{path} holds results of another training ({', '.join(differing)}); choose another --out")
    done = [[r["size"], r["variant"], r["seed"], r["learning_rate"]] for r in there]
    left = [job for job in jobs if job.key not in done]
    origin = {"training": shared, "commit": code_version(ROOT)}
    context = multiprocessing.get_context("spawn")
    with Progress(console=Console(stderr=True)) as progress, ProcessPoolExecutor(workers, context) as pool:
        task = progress.add_task(f"training runs -> {path}", total=len(jobs), completed=len(jobs) - len(left))
        futures = [pool.submit(run_job, job, training, weights) for job in left]
        try:
            for future in as_completed(futures):
                append_line(path, json.dumps({**future.result(), **origin, "time": time.time()}))
                progress.update(task, advance=1)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def finish(options: Options, plan: Plan, path: Path) -> None:
    """Table, figure, report.json and, if asked for, the page of all results that there are."""
    results = read_results(path)
    if not results:
        raise ValueError(f"{path} holds no results yet")
    rows, figure = paired(results, plan.baseline), options.figure or options.out / "ablation.svg"
    write_atomically(
        options.out / "report.json", json.dumps({"baseline": plan.baseline, "rows": rows}, indent=1) + "\n"
    )
    draw(rows, figure)
    section = ablation_section(rows, results, figure, options.page)
    Console().print(Markdown(section))
    if options.page:
        put_section(options.page, section)
    print(f"written: {options.out}/report.json, {figure}" + (f", {options.page}" if options.page else ""))


if __name__ == "__main__":
    main()
