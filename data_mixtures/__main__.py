"""`python -m data_mixtures STAGE RECIPE.toml --out DIR`: one stage from text to shards.

    plan, fetch, filter, dedup, tokenize, runs, shuffle, manifest: in this order; each can be killed and
    restarted verify, stats: check and describe prepared data free: delete the files of a stage (--stage)
    that the next stage has read, to save disk space show LOCK|RUN: what training reads, as text, and where
    it came from (`show --help`)

`python -m data_mixtures.prepare` runs them all.
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from data_mixtures import prepare, recipe, show
from data_mixtures.stages import pipeline, stage


def main() -> int:
    if sys.argv[1:2] == ["show"]:  # of a lock or a run folder, not of a recipe
        shown = show.parser().parse_args(sys.argv[2:])
        return prepare.reported(lambda: show.run(shown, Console()))
    arguments = parser().parse_args()
    return prepare.reported(lambda: run(arguments, Console()))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m data_mixtures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("command", choices=pipeline.STAGES)
    prepare.add_arguments(made)
    made.add_argument("--sources", help="names of sources, separated by commas; default: all of the recipe")
    made.add_argument(
        "--stage", choices=tuple(pipeline.READERS), help="free: the stage whose files to delete"
    )
    made.add_argument(
        "--repair", action="store_true", help="verify: restore single damaged blocks from parity"
    )
    made.add_argument(
        "--quarantine", action="store_true", help="verify: --repair, then take damaged shards out"
    )
    made.add_argument("--sequences", help="stats: length of each phase, such as phase1=1000000,phase2=500000")
    return made


def run(arguments: argparse.Namespace, console: Console) -> None:
    """One stage. ValueError for everything that a user can fix."""
    loaded = recipe.load(arguments.recipe)
    names = tuple(source.name for source in loaded.sources)
    sources = tuple(arguments.sources.split(",")) if arguments.sources else names
    recipe.check_known("source", sources, names)
    with stage.exclusive(arguments.out):
        context = pipeline.RunContext(
            loaded, arguments.out, sources, prepare.options(arguments), console, arguments.mirror,
            budget_bytes=arguments.budget_bytes, to_free=arguments.stage, repair=arguments.repair,
            quarantine=arguments.quarantine, sequences=_sequences(arguments.sequences), replace=arguments.replace,
        )  # fmt: skip
        context.do(arguments.command)


def _sequences(given: str | None) -> dict[str, int]:
    pairs = [pair.partition("=") for pair in given.split(",")] if given else []
    for phase, _, count in pairs:
        if not count.isdecimal():
            raise ValueError(
                f"--sequences {given!r}: {phase!r} needs a number, as in phase1=1000000,phase2=500000"
            )
    return {phase: int(count) for phase, _, count in pairs}


if __name__ == "__main__":
    sys.exit(main())
