"""What an ablation trains: its options, and its config file, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli
import tyro

from records.job import read_sections

from .training import Job, Training

KEYS = ("baseline", "seeds", "learning_rates", "training", "sizes", "variants")


@dataclass
class Options:
    config: tyro.conf.Positional[Path]
    """The variants, sizes, seeds and the training that they share (TOML)."""
    out: Path
    """Folder of results.jsonl, runs, report.json and ablation.svg."""
    sizes: tuple[str, ...] = ("0m5",)
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
    """Keep a model folder of each run in OUT/weights, for tools.ablate.diagnose; the others' weights are not kept."""
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
        values = tomli.loads(options.config.read_text(encoding="utf-8"))
        if unknown := [key for key in values if key not in KEYS] + [key for key in KEYS if key not in values]:
            raise ValueError(
                f"{options.config}: {unknown[0]!r} is unknown or missing; the keys are {', '.join(KEYS)}"
            )
        on_cuda = values["training"].pop("cuda", {})
        known = {field.name for field in dataclasses.fields(Training)}
        if unknown := [key for key in (*values["training"], *on_cuda) if key not in known]:
            raise ValueError(
                f"{options.config}: [training] has no {unknown[0]!r}; choose from {sorted(known)}"
            )
        shared = values["training"] | (on_cuda if options.device == "cuda" else {})
        given = {"device": options.device, "lock": options.lock, "steps": options.steps}
        shared |= {key: value for key, value in given.items() if value is not None}
        shared["job"] = read_sections(Path(shared["job"]))
        sizes = chosen("size", options.sizes, values["sizes"])
        variants = chosen("variant", options.variants or tuple(values["variants"]), values["variants"])
        if values["baseline"] not in variants:
            raise ValueError(
                f"the baseline {values['baseline']!r} is not among the variants {', '.join(variants)}"
            )
        return cls(
            values["baseline"], values["seeds"], values["learning_rates"], Training(**shared), sizes, variants
        )

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
