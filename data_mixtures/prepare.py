"""`python -m data_mixtures.prepare RECIPE.toml --out DIR`: text -> token shards, manifests, lock
files, in one go.

    DIR/tokenizer.model
    DIR/<source>/source.json, shard-NNNNN.bin, shard-NNNNN.docs.zst, valid.bin
    DIR/phase1.lock.json, DIR/phase2.lock.json, ...
    DIR/plan.json, DIR/<stage>/<source>/unit-NNNNN/: intermediate results; a restart continues from them

It runs all stages in order (`python -m data_mixtures` runs one). The same texts give the same bytes,
whatever the number of workers, and however often it was killed and started again. The arguments of
both commands are here.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from data_mixtures import recipe, shards
from data_mixtures.stages import pipeline, stage
from data_mixtures.stages.run import AGAIN, KINDS, Options, figures
from records.workers import usable_cpus

SBATCH = ("partition", "time", "cpus-per-task", "mem-per-cpu", "account")
SLURM_WORKERS = 64


def prepare(
    recipe_path: Path,
    out: Path,
    options: Options,
    console: Console,
    mirror: str | None = None,
    budget_bytes: int | None = None,
    replace: bool = False,
) -> None:
    """Run all stages. ValueError for a wrong recipe, missing text, a full disk...; finished units are kept."""
    started = time.monotonic()
    loaded = recipe.load(recipe_path)
    sources = tuple(source.name for source in loaded.sources)
    console.print(f"preparing {recipe_path} -> {out}", soft_wrap=True)
    with stage.exclusive(out):
        context = pipeline.RunContext(
            loaded, out, sources, options, console, mirror, budget_bytes, tables=False, replace=replace
        )
        pipeline.check(loaded, out)
        for name in pipeline.TO_SHARDS:
            context.do(name)
        made = context.publish()
    console.print(_summary(out, made))
    for phase, weights in loaded.phases.items():
        shares = ", ".join(
            f"{name} {100 * weight / sum(weights.values()):.2f} %" for name, weight in weights.items()
        )
        console.print(f"{out / phase}.lock.json: {shares}", soft_wrap=True, highlight=False)
    console.print(f"took {time.monotonic() - started:.1f} s", highlight=False)


def _summary(out: Path, made: dict[str, str]) -> Table:
    rows = []
    for name, how in made.items():
        m = shards.read_manifest(out / name)
        counts = [f"{m['documents']:,}", f"{sum(m['dropped'].values()):,}"]
        sizes = [f"{m['tokens'] / 1e6:.2f}", f"{m['bytes'] / 1e6:.2f}", f"{m['bytes'] / m['tokens']:.2f}"]
        rows.append([name, *counts, *sizes, f"{m['windows']:,}", f"{m['valid']['windows']:,}", how])
    head = ("source", "docs", "dropped", "Mtokens", "MB", "B/tok", "windows", "valid", "")
    return figures(f"data in {out}", head, rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="a recipe TOML, e.g. data_mixtures/demo.toml")
    parser.add_argument("--out", type=Path, required=True, help="the data folder that is written")
    workers = "processes at a time; default: the CPUs here. With --executor slurm: tasks of the array at a time (its %%N)"  # noqa: E501
    parser.add_argument("--workers", type=int, help=f"{workers}; default: {SLURM_WORKERS}")
    parser.add_argument(
        "--mirror", help="read <repo>/<config>/*.parquet from this folder or fsspec URL, not the hub"
    )
    parser.add_argument("--budget-bytes", type=int, help="refuse to fetch if DIR/fetch would become larger")
    parser.add_argument(
        "--replace", action="store_true", help="let other data replace sources that a lock pins"
    )
    parser.add_argument("--executor", choices=KINDS, default="local", help="where units run")
    for name in SBATCH:
        parser.add_argument(f"--{name}", help="passed to sbatch; needs --executor slurm")
    more = "any other option of sbatch; can be repeated"
    parser.add_argument("--sbatch", action="append", default=[], metavar="KEY[=VALUE]", help=more)


def options(arguments: argparse.Namespace) -> Options:
    """The executor that the arguments ask for. ValueError for options of another one."""
    default = SLURM_WORKERS if arguments.executor == "slurm" else usable_cpus()
    workers = default if arguments.workers is None else arguments.workers
    recipe.check_integer("--workers", workers)
    given = {name: getattr(arguments, name.replace("-", "_")) for name in SBATCH}
    sbatch = {name: value for name, value in given.items() if value is not None}
    sbatch |= {key.lstrip("-"): value for key, _, value in (each.partition("=") for each in arguments.sbatch)}
    if sbatch and arguments.executor != "slurm":
        raise ValueError(
            f"--{next(iter(sbatch))} is for --executor slurm, this is --executor {arguments.executor}"
        )
    return Options(workers, arguments.executor, sbatch)


def reported(run: Callable[[], None]) -> int:
    """The exit status of a command; what a user can fix is one line, not a traceback."""
    try:
        run()
    except (ValueError, OSError) as error:  # their messages say what is wrong
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        print(f"stopped; {str(stop) or AGAIN}", file=sys.stderr)
        return 130
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m data_mixtures.prepare", description=__doc__.split("\n")[0]
    )
    add_arguments(parser)
    given = parser.parse_args()
    return reported(
        lambda: prepare(
            given.recipe,
            given.out,
            options(given),
            Console(),
            given.mirror,
            given.budget_bytes,
            given.replace,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
