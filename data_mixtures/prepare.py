"""`python -m data_mixtures.prepare RECIPE.toml --out DIR`: text -> token shards, manifests, lock files, in one go.

    DIR/tokenizer.model
    DIR/<source>/source.json, shard-NNNNN.bin, shard-NNNNN.docs.zst, valid.bin
    DIR/phase1.lock.json, DIR/phase2.lock.json, ...
    DIR/plan.json, DIR/<stage>/<source>/unit-NNNNN/: how it was made; a restart goes on from there

It runs all stages in a row (`python -m data_mixtures` runs one). The same texts give the same bytes, whatever the
number of workers, and however often it was killed and started again.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from data_mixtures import command, recipe, shards
from data_mixtures.stages import execute, manifest, stage
from data_mixtures.stages import table as stages


def prepare(
    recipe_path: Path,
    out: Path,
    options: execute.Options,
    console: Console,
    mirror: str | None = None,
    budget_bytes: int | None = None,
) -> None:
    """The whole way. ValueError for a wrong recipe, missing text, a full disk...; what was finished stays."""
    started = time.monotonic()
    plan = recipe.load(recipe_path)
    sources = tuple(source.name for source in plan.sources)
    console.print(f"preparing {recipe_path} -> {out}", soft_wrap=True)
    with stage.exclusive(out), execute.Executor(options) as executor:
        way = stages.Way(plan, out, sources, executor, console, mirror, budget_bytes, tables=False)
        stages.check(plan, out)
        for name in stages.TO_SHARDS:
            stages.STAGES[name](way)
        made = manifest.write(plan, out, sources, console)
    console.print(_summary(out, made))
    for phase, weights in plan.phases.items():
        shares = ", ".join(f"{name} {100 * weight / sum(weights.values()):.2f} %" for name, weight in weights.items())
        console.print(f"{out / phase}.lock.json: {shares}", soft_wrap=True, highlight=False)
    console.print(f"took {time.monotonic() - started:.1f} s", highlight=False)


def _summary(out: Path, made: dict[str, str]) -> Table:
    table = Table(box=box.SIMPLE, title=f"data in {out}", title_justify="left", pad_edge=False, collapse_padding=True)
    table.add_column("source", no_wrap=True)
    for column in ("docs", "dropped", "Mtokens", "MB", "B/tok", "windows", "valid", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for name, how in made.items():
        m = shards.read_manifest(out / name)
        counts = [f"{m['documents']:,}", f"{sum(m['dropped'].values()):,}"]
        sizes = [f"{m['tokens'] / 1e6:.2f}", f"{m['bytes'] / 1e6:.2f}", f"{m['bytes'] / m['tokens']:.2f}"]
        table.add_row(name, *counts, *sizes, f"{m['windows']:,}", f"{m['valid']['windows']:,}", how)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m data_mixtures.prepare", description=__doc__.split("\n")[0])
    command.add_arguments(parser)
    arguments = parser.parse_args()

    def run() -> None:
        options = command.options(arguments)
        prepare(arguments.recipe, arguments.out, options, Console(), arguments.mirror, arguments.budget_bytes)

    return command.reported(run)


if __name__ == "__main__":
    sys.exit(main())
