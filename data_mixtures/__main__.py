"""`python -m data_mixtures STAGE RECIPE.toml --out DIR`: one stage of the way from text to shards.

    plan, fetch, hydrate, filter, tokenize, shuffle, manifest: in this order; each can be killed and started again
    verify, stats: look at what was made
    free: delete the files of a stage (--stage) that the next one is through with, where the disk does not hold all

`python -m data_mixtures.prepare` runs them in a row.
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from data_mixtures import command, recipe
from data_mixtures.stages import stage
from data_mixtures.stages import table as stages
from data_mixtures.stages.execute import Executor


def main() -> int:
    arguments = parser().parse_args()
    return command.reported(lambda: run(arguments, Console()))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m data_mixtures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("command", choices=stages.STAGES)
    command.add_arguments(made)
    made.add_argument("--sources", help="only these, separated by commas; default: all of the recipe")
    made.add_argument("--stage", choices=stages.FREEABLE, help="for free: whose files to delete")
    made.add_argument("--quarantine", action="store_true", help="for verify: take damaged shards out of the data")
    made.add_argument("--sequences", help="for stats: of each phase, e.g. phase1=1000000,phase2=500000, to show epochs")
    return made


def run(arguments: argparse.Namespace, console: Console) -> None:
    """One stage. ValueError for everything that a user can mend."""
    plan = recipe.load(arguments.recipe)
    names = tuple(source.name for source in plan.sources)
    sources = tuple(arguments.sources.split(",")) if arguments.sources else names
    recipe.check_known("source", sources, names)
    with stage.exclusive(arguments.out), Executor(command.options(arguments)) as executor:
        way = stages.Way(
            plan, arguments.out, sources, executor, console, arguments.mirror, arguments.budget_bytes,
            to_free=arguments.stage, quarantine=arguments.quarantine,
            sequences=_sequences(arguments.sequences),
        )  # fmt: skip
        stages.STAGES[arguments.command](way)


def _sequences(given: str | None) -> dict[str, int]:
    pairs = [pair.partition("=") for pair in given.split(",")] if given else []
    for phase, _, count in pairs:
        if not count.isdecimal():
            raise ValueError(f"--sequences {given!r}: {phase!r} needs a number, as in phase1=1000000,phase2=500000")
    return {phase: int(count) for phase, _, count in pairs}


if __name__ == "__main__":
    sys.exit(main())
