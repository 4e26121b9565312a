"""What `python -m data_mixtures` and `python -m data_mixtures.prepare` share: arguments, and how errors end."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from data_mixtures import recipe
from data_mixtures.stages import execute

SBATCH = ("partition", "time", "cpus-per-task", "mem-per-cpu", "account")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="a recipe TOML, e.g. data_mixtures/demo.toml")
    parser.add_argument("--out", type=Path, required=True, help="the data folder to make")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes; never changes the result")
    parser.add_argument("--mirror", help="a folder or URL (fsspec) with <repo>/<config>/*.parquet, instead of the hub")
    parser.add_argument("--budget-bytes", type=int, help="refuse to fetch when DIR/fetch would hold more")
    parser.add_argument(
        "--executor", choices=execute.KINDS, default="local", help="where units run (datatrove's names)"
    )
    for name in SBATCH:
        parser.add_argument(f"--{name}", help="for sbatch, with --executor slurm")


def options(arguments: argparse.Namespace) -> execute.Options:
    """The executor that the arguments ask for. ValueError for options of another one."""
    recipe.check_integer("--workers", arguments.workers)
    given = {name: getattr(arguments, name.replace("-", "_")) for name in SBATCH}
    sbatch = {name: value for name, value in given.items() if value is not None}
    if sbatch and arguments.executor != "slurm":
        raise ValueError(f"--{next(iter(sbatch))} is for --executor slurm, this is --executor {arguments.executor}")
    return execute.Options(arguments.workers, arguments.executor, sbatch)


def reported(run: Callable[[], None]) -> int:
    """The exit status of a command; what a user can mend is one line, not a traceback."""
    try:
        run()
    except (ValueError, OSError) as error:  # of a file or a disk, the message says which and what
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"stopped; {execute.AGAIN}", file=sys.stderr)
        return 130
    return 0
