"""What an ablation trains: its options, and its config file, checked; and what its runs would take on one H100."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli
import tyro

from data_mixtures.mixture import read_lock
from data_mixtures.recipe import check_known
from laneformer import LaneformerConfig
from laneformer.engine.cuda.cards import card_named
from laneformer.flops import flops_per_token
from records.job import read_sections
from tools.markdown import table

from .job_config import JOINS
from .training import Job, Training


@dataclass
class Options:
    config: tyro.conf.Positional[Path]
    """The variants, sizes, seeds and the training that they share (TOML)."""
    out: Path
    """Folder of results.jsonl, runs, report.json and ablation.svg."""
    sizes: tuple[str, ...] = ("1m",)
    """Sizes of the config to train."""
    variants: tuple[str, ...] = ()
    """Variants of the config; default: all."""
    learning_rates: tuple[float, ...] = ()
    """Learning rates of every variant; default: the config's."""
    seeds: tuple[int, ...] = ()
    """Default: the config's; more of them go on from what there is."""
    workers: int = 2
    """Runs side by side, one thread each on a CPU."""
    device: str | None = None
    """cpu or cuda; default: the config's. With cuda its [training.cuda] goes before [training]."""
    lock: str | None = None
    """The mixture; default: the config's."""
    steps: int | None = None
    """Steps of a run; default: the config's."""
    branch_at: float | None = None
    """Train the baseline alone whole; the other variants leave its run after this share of the steps. 1 - the job's
    decay_ratio is where the rate begins to fall. Takes an --out of its own.
    """
    keep_weights: bool = False
    """Keep a model folder of each run in OUT/weights."""
    report: bool = False
    """Train nothing; report what there is."""
    page: Path | None = None
    """Markdown page whose section about these results is to be written, and docs/images/ablation.svg with it.
    """
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
        path = options.config
        values = tomli.loads(path.read_text(encoding="utf-8"))
        keys, of_training = ([field.name for field in dataclasses.fields(each)] for each in (cls, Training))
        check_known(f"key of {path}", values, keys)
        if missing := sorted({*keys} - values.keys()):
            raise ValueError(f"{path} lacks {', '.join(missing)}")
        on_cuda = values["training"].pop("cuda", {})
        check_known(f"key of [training] in {path}", [*values["training"], *on_cuda], of_training)
        shared = values["training"] | (on_cuda if options.device == "cuda" else {})
        given = {
            "device": options.device,
            "lock": options.lock,
            "steps": options.steps,
            "branch_at": options.branch_at,
        }
        shared |= {key: value for key, value in given.items() if value is not None}
        values["learning_rates"] = list(options.learning_rates) or values["learning_rates"]
        values["seeds"] = list(options.seeds) or values["seeds"]
        shared["job"] = read_sections(Path(shared["job"]))
        for kind, names in (("sizes", options.sizes), ("variants", options.variants or values["variants"])):
            check_known(f"name for --{kind}:", names, values[kind])
            values[kind] = {name: values[kind][name] for name in names}
        check_known("baseline", [values["baseline"]], values["variants"])
        plan = cls(**values | {"training": Training(**shared)})
        if plan.training.branch_at:
            plan.check_branches()
        return plan

    def check_branches(self) -> None:
        """ValueError for a step at which nothing can branch, or a variant with other weights than the baseline's."""
        step, steps = self.training.branch_step, self.training.steps
        if not 0 < step < steps:
            raise ValueError(
                f"branch_at = {self.training.branch_at:g} is step {step} of {steps}; choose one between"
            )
        base = self.variants[self.baseline]
        for name, own in self.variants.items():
            differ = [key for key in {**base, **own} if own.get(key) != base.get(key)]
            if others := [key for key in differ if key not in (*JOINS, "joins")]:
                raise ValueError(
                    f"variant {name!r} cannot branch off {self.baseline!r}: it has {', '.join(others)} of its own; "
                    "leave it out of --variants"
                )

    def job(self, size: str, variant: str, seed: int, rate: float) -> Job:
        own = dict(self.variants[variant])
        joins, offset = own.pop("joins", None), own.pop("seed_offset", 0)
        model = {**self.sizes[size], **own}
        model["intermediate_size"] = round(model["intermediate_size"] * model.pop("intermediate_share", 1.0))
        branches = self.training.branch_at and variant != self.baseline
        trunk = self.job(size, self.baseline, seed, rate).name if branches else ""
        return Job(size, variant, seed, rate, model, joins, offset, trunk)

    def jobs(self) -> Iterator[Job]:
        """Every learning rate on every seed; a rate chosen on one is chosen by that seed's luck."""
        for size in self.sizes:
            for rate in self.learning_rates:
                for seed in self.seeds:
                    yield from (self.job(size, variant, seed, rate) for variant in self.variants)


def price_section(plan: Plan, mfu_percent: float, gpu_hour_price: float) -> str:
    """Runs, tokens, FLOPs, hours and USD of each size, as Markdown: a calculation from FLOPs and an
    assumed utilisation, not a timing; validation and compiling are not counted.
    """
    lock, training = Path(plan.training.lock), plan.training
    vocabulary = read_lock(lock)["vocab_size"] if lock.exists() else LaneformerConfig().vocab_size
    peak_flops = card_named("h100").peak_flops
    each, rows, hours_in_all = len(plan.learning_rates) * len(plan.seeds), [], 0.0
    for size in plan.sizes:
        models = [plan.job(size, variant, 0, 0.0).model for variant in plan.variants]
        configs = [LaneformerConfig(vocab_size=vocabulary, **model) for model in models]
        flops = each * training.tokens * sum(flops_per_token(config, training.seq_len) for config in configs)
        hours = flops / (mfu_percent / 100 * peak_flops) / 3600
        hours_in_all += hours
        parameters = f"{configs[0].parameter_count()['total'] / 1e6:.0f}M"
        rows.append((size, parameters, each * len(configs), f"{hours:.2f}", f"{hours * gpu_hour_price:.2f}"))
    return (
        f"{table(('size', 'parameters', 'runs', 'H100 hours', 'USD'), rows)}\n\n"
        f"Together {hours_in_all:.1f} hours, {hours_in_all * gpu_hour_price:.0f} USD. Calculated, not measured: each "
        f"run trains on {training.tokens / 1e6:.4g}M tokens of windows of {training.seq_len}, at an assumed "
        f"{mfu_percent:g}% of {peak_flops / 1e12:.0f} TFLOP/s and {gpu_hour_price:g} USD an hour. "
        f"The vocabulary has {vocabulary} entries"
        + ("." if lock.exists() else f", since {lock} does not exist yet.")
    )
