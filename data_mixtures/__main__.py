"""Prepare token shards from text, one stage at a time or all at once, and show what they contain.

- `prepare` runs all stages, as `python -m data_mixtures.prepare` does.
- `plan`, `fetch`, `filter`, `dedup`, `tokenize`, `runs`, `shuffle`, `manifest` are its stages, in this order; each
  can be killed and run again.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from data_mixtures import prepare, show, store
from data_mixtures.prepare import Arguments
from data_mixtures.stages import pipeline
from data_mixtures.stages import stats as statistics
from records.command import run_command

DataArguments = tyro.conf.OmitArgPrefixes[Arguments]
Sources = Annotated[str, tyro.conf.arg(help="names of sources, separated by commas; default: all")]


def run(arguments: Sequence[str]) -> None:
    """Run one command; ValueError for everything that a user can fix."""
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


def open_run(arguments: Arguments, sources: str) -> AbstractContextManager[pipeline.RunContext]:
    console = Console(highlight=False)
    return pipeline.open_run(
        arguments.recipe,
        arguments.out,
        arguments.options(),
        console,
        sources,
        **arguments.settings(),
    )


def check_on_disk(arguments: Arguments, command: str) -> None:
    """Raise ValueError for a command that reads all data while they are behind a URL."""
    if url := store.url_of(arguments.out):
        copy = f"copy the <source> folders, tokenizer.* and *.lock.json of {url} to a folder"
        raise ValueError(
            f"{command} reads all data, and they are not on this disk: {copy}, and give that as --out"
        )


def one_stage(name: str, /, arguments: DataArguments, sources: Sources = "") -> None:
    """Run this stage alone."""
    with open_run(arguments, sources) as context:
        pipeline.do(context, name)


def manifest(arguments: DataArguments, sources: Sources = "") -> None:
    """Publish the shards with their manifests, and pin the phases."""
    with open_run(arguments, sources) as context:
        pipeline.publish(context)


def verify(arguments: DataArguments, sources: Sources = "") -> None:
    """Compare every byte with its manifest; for damage, print the commands that restore it."""
    check_on_disk(arguments, "verify")
    with open_run(arguments, sources) as context:
        pipeline.check_data(context, arguments.recipe)


def stats(arguments: DataArguments, sources: Sources = "") -> None:
    """Print statistics of prepared data, and write DIR/stats.json."""
    check_on_disk(arguments, "stats")
    with open_run(arguments, sources) as context:
        statistics.write(context.out, context.sources, context.console, context.threads)


def free(
    arguments: DataArguments,
    stage: Literal["fetch", "filter", "tokenize", "runs"],
    sources: Sources = "",
) -> None:
    """Delete the files of a stage, if the stage that reads them has done all units.

    Args:
        stage: the stage whose files to delete
    """
    with open_run(arguments, sources) as context:
        pipeline.free(context, stage)


if __name__ == "__main__":
    run_command("data_mixtures", lambda: run(sys.argv[1:]), interrupted=prepare.STOPPED)
