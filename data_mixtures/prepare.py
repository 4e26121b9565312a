"""`python -m data_mixtures.prepare RECIPE.toml --out DIR`: all stages from text to shards and locks.

    DIR/tokenizer.model
    DIR/<source>/source.json, shard-NNNNN.bin, shard-NNNNN.docs.zst, valid.bin
    DIR/phase1.lock.json, DIR/phase2.lock.json, ...
    DIR/plan.json, DIR/<stage>/<source>/unit-NNNNN/: intermediate results; a restart continues from them

It runs all stages in order (`python -m data_mixtures` runs one). The same texts give the same bytes, whatever
the number of workers, and however often it was killed and started again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console

from data_mixtures import shards
from data_mixtures.stages import pipeline, stats
from data_mixtures.stages.run import Options
from data_mixtures.stages.stage import AGAIN
from records.command import Count, check_ranges, run_command
from records.workers import usable_cpus

STOPPED = f"stopped; {AGAIN}"


def prepare(
    recipe_path: Path, out: Path, options: Options, console: Console, **settings: Any
) -> None:
    """Run all stages; finished units are kept after an error.

    Args:
        settings: mirror, budget_bytes, replace, as in `Arguments`.

    Raises:
        ValueError: wrong recipe, missing text, full disk...
    """
    started = time.monotonic()
    console.print(f"preparing {recipe_path} -> {out}", soft_wrap=True)
    with pipeline.open_run(recipe_path, out, options, console, tables=False, **settings) as context:
        out = context.out
        for name in pipeline.TO_SHARDS:
            pipeline.do(context, name)
        outcomes = pipeline.publish(context)
    manifests = {name: shards.read_manifest(out / name) for name in outcomes}
    for table in stats.sizes_and_lengths(manifests):
        console.print(table)
    stats.print_lost_files(manifests, console)
    for phase, weights in context.recipe.phases.items():
        total = sum(weights.values())
        shares = ", ".join(
            f"{name} {100 * weight / total:.2f} %" for name, weight in weights.items()
        )
        console.print(f"{out / phase}.lock.json: {shares}", soft_wrap=True)
    console.print(f"took {time.monotonic() - started:.1f} s")


@dataclass(frozen=True)
class Arguments:
    """What all commands that work on a recipe take."""

    recipe: tyro.conf.Positional[Path]
    """A recipe TOML, e.g. data_mixtures/demo.toml"""
    out: Path
    """The data folder that is written, or its URL, such as s3://bucket/data"""
    workers: Count | None = None
    """Units at a time; default: one for each CPU, of this machine or of Ray's cluster"""
    mirror: str | None = None
    """Read <repo>/<config>/*.parquet from this folder or fsspec URL, not the hub"""
    budget_bytes: int | None = None
    """Refuse to fetch if DIR/fetch would become larger"""
    replace: tyro.conf.FlagCreatePairsOff[bool] = False
    """Let other data replace sources that a lock pins"""
    executor: Literal["local", "ray"] = "local"
    """Where units run: processes here, or the Ray cluster of RAY_ADDRESS, else one of this machine alone"""

    def options(self) -> Options:
        check_ranges(Arguments, vars(self))
        if self.workers is None:
            return Options(0 if self.executor == "ray" else usable_cpus(), self.executor)
        return Options(self.workers, self.executor)

    def settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("mirror", "budget_bytes", "replace")}


def run(arguments: tyro.conf.OmitArgPrefixes[Arguments]) -> None:
    """All stages, from text to shards, manifests and lock files."""
    console = Console(highlight=False)
    recipe, out = arguments.recipe, arguments.out
    prepare(recipe, out, arguments.options(), console, **arguments.settings())


def main() -> None:
    tyro.cli(run, prog="python -m data_mixtures.prepare", description=__doc__)


if __name__ == "__main__":
    run_command("data_mixtures.prepare", main, interrupted=STOPPED)
