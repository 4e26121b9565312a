"""`python -m data_mixtures COMMAND ...`: from text to shards, and what is in them.

prepare RECIPE.toml --out DIR: all stages (`python -m data_mixtures.prepare` is the same)
plan, fetch, filter, dedup, tokenize, runs, shuffle, manifest: one stage; in this order; each can be killed
and restarted
verify, stats: check and describe prepared data
free --stage NAME: delete the files of a stage that the next stage has read, to save disk space
show LOCK|RUN: what training reads, as text, and where it came from
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from data_mixtures import prepare, recipe, recipe_file, show, store
from data_mixtures.prepare import Arguments
from data_mixtures.stages import pipeline, stage
from data_mixtures.stages import stats as statistics

Given = tyro.conf.OmitArgPrefixes[Arguments]
Sources = Annotated[str, tyro.conf.arg(help="names of sources, separated by commas; default: all")]


def main() -> int:
    return prepare.reported(lambda: run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> None:
    """One command. ValueError for everything that a user can fix."""
    commands: dict[str, Callable[..., Any]] = {
        "prepare": prepare.run,
        **{name: functools.partial(one_stage, name) for name in pipeline.TO_SHARDS},
        "manifest": manifest,
        "verify": verify,
        "stats": stats,
        "free": free,
        "show": show.command,
    }
    tyro.extras.subcommand_cli_from_dict(
        commands, prog="python -m data_mixtures", description=__doc__, args=arguments
    )


@contextmanager
def begun(given: Arguments, names: str) -> Iterator[pipeline.RunContext]:
    loaded = recipe_file.load(given.recipe)
    known = tuple(source.name for source in loaded.sources)
    sources = tuple(names.split(",")) if names else known
    recipe.check_known("source", sources, known)
    how = given.options(), Console(highlight=False), given.mirror, given.budget_bytes, given.replace
    with stage.exclusive(given.out) as out:
        yield pipeline.RunContext(loaded, out, sources, *how)


def one_stage(name: str, /, given: Given, sources: Sources = "") -> None:
    """One stage from text to shards."""
    with begun(given, sources) as context:
        pipeline.do(context, name)


def manifest(given: Given, sources: Sources = "") -> None:
    """Publish the shards with their manifests, and pin the phases."""
    with begun(given, sources) as context:
        pipeline.publish(context)


def verify(given: Given, sources: Sources = "") -> None:
    """Compare every byte with its manifest; for damage, print the commands that restore it."""
    with begun(given, sources) as context:
        pipeline.check_data(context, given.recipe)


def stats(given: Given, sources: Sources = "") -> None:
    """Tables of what prepared data holds, and DIR/stats.json."""
    with begun(given, sources) as context:
        store.check_on_disk(context.out, "stats")
        statistics.write(context.out, context.sources, context.console, context.options.threads)


def free(given: Given, stage: Literal["fetch", "filter", "tokenize", "runs"], sources: Sources = "") -> None:
    """Delete the files of a stage, if the stage that reads them has done all units.

    Args:
        stage: the stage whose files to delete
    """
    with begun(given, sources) as context:
        pipeline.free(context, stage)


if __name__ == "__main__":
    sys.exit(main())
