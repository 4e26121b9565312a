"""The stages in their order, and how each is run over the sources of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from data_mixtures import tokenizer
from data_mixtures.recipe import HubSource, Recipe
from data_mixtures.stages import decontaminate, manifest, plan, shuffle, stage, tokenize, verify
from data_mixtures.stages.fetch import Fetch, check_enough
from data_mixtures.stages.filter import Filter
from data_mixtures.stages.hydrate import Hydrate
from data_mixtures.stages.run import Executor, run_units, summary

FREEABLE = ("fetch", "hydrate", "filter", "tokenize")


@dataclass(frozen=True)
class RunContext:
    """What a stage is run on.

    mirror: where files come from instead of the hub. budget_bytes: how much `fetch` may hold. to_free: the stage whose
    files `free` deletes. quarantine: whether `verify` takes damaged shards out of their manifests. sequences: how many
    of each phase, for the epochs in `stats`. tables: whether to print a table after every stage.
    """

    recipe: Recipe
    out: Path
    sources: tuple[str, ...]
    executor: Executor
    console: Console
    mirror: str | None = None
    budget_bytes: int | None = None
    to_free: str | None = None
    quarantine: bool = False
    sequences: Mapping[str, int] | None = None
    tables: bool = True

    def run(self, work: stage.Stage) -> None:
        receipts = run_units(work, self.executor, self.console)
        if self.tables and receipts:
            self.console.print(summary(work.name, receipts))

    def stage(self, name: str, sources: tuple[str, ...]) -> stage.Stage:
        if name == "fetch":
            return Fetch(self.recipe, self.out, sources, self.mirror)
        kinds = {"hydrate": Hydrate, "filter": Filter, "tokenize": tokenize.Tokenize, "shuffle": shuffle.WriteShards}
        return kinds[name](self.recipe, self.out, sources)


def check(recipe: Recipe, out: Path) -> None:
    """Check what the last stages need before the first ones take days. ValueError says what is missing."""
    if isinstance(recipe.tokenizer, Path):
        tokenizer.load(recipe.tokenizer)
    decontaminate.make_index(recipe.filter.benchmarks, out)
    Hydrate(recipe, out, tuple(each.name for each in recipe.sources)).check()


def _plan(context: RunContext) -> None:
    made = plan.make(context.recipe, context.out, context.sources, context.mirror)["sources"]
    units = sum(len(made[name]["units"]) for name in context.sources)
    context.console.print(f"plan     {units:6} units of {len(context.sources)} sources", highlight=False)
    if not context.tables:
        return
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for name in ("source", "units", "bytes", "revision", "gate", "licence"):
        table.add_column(name, justify="right" if name in ("units", "bytes") else "left")
    for name in context.sources:
        planned = made[name]
        size = sum(unit["bytes"] if unit["kind"] == "parquet" else _bytes(unit) for unit in planned["units"])
        facts = (planned.get(key, "") for key in ("revision", "gate", "licence"))
        table.add_row(name, f"{len(planned['units']):,}", f"{size:,}", *facts)
    context.console.print(table)


def _bytes(unit: stage.Entry) -> int:
    return sum(size for _, size, _ in unit["files"])


def _fetch(context: RunContext) -> None:
    work = Fetch(context.recipe, context.out, context.sources, context.mirror)
    work.check_room(context.budget_bytes)
    context.run(work)
    check_enough(context.recipe, context.out, context.sources)


def _hydrate(context: RunContext) -> None:
    work = context.stage("hydrate", context.sources)
    if work.units():
        context.run(work)


def _filter(context: RunContext) -> None:
    decontaminate.make_index(context.recipe.filter.benchmarks, context.out)
    context.run(context.stage("filter", context.sources))


def _tokenize(context: RunContext) -> None:
    tokenize.make_tokenizer(context.recipe, context.out)
    context.run(context.stage("tokenize", context.sources))


def _shuffle(context: RunContext) -> None:
    context.run(shuffle.OrderDocuments(context.recipe, context.out, context.sources))
    context.run(context.stage("shuffle", context.sources))


def _manifest(context: RunContext) -> None:
    manifest.write(context.recipe, context.out, context.sources, context.console)


def _verify(context: RunContext) -> None:
    report = verify.verify(context.out, context.sources, context.console, context.executor.options.workers)
    if context.quarantine and report.damage:
        verify.quarantine(context.out, report.damage, context.console)
    elif report.damage:
        raise ValueError(
            f"{len(report.damage)} damaged, named above; --quarantine removes damaged shards from the data"
        )


def _stats(context: RunContext) -> None:
    from data_mixtures.stages import stats  # here: importing plotly takes half a second

    stats.write(
        context.out, context.sources, context.console, context.sequences, workers=context.executor.options.workers
    )


def _free(context: RunContext) -> None:
    """Delete the files of a stage, source by source, if the stage that reads them has done all units."""
    if context.to_free is None:
        raise ValueError(f"free needs --stage, one of {', '.join(FREEABLE)}")
    for name in context.sources:
        if (reader := _reader(context, name)) is None:
            continue
        if left := [unit for unit in reader.units() if not stage.is_done(reader, unit)]:
            raise ValueError(
                f"{context.to_free} of {name!r} is still needed: {len(left)} units are not through {reader.name}"
            )
        freed = sum(stage.free(context.out, context.to_free, unit) for unit in stage.planned_units(context.out, name))
        context.console.print(f"{name}: {freed:,} bytes of {context.to_free} are free", highlight=False)


def _reader(context: RunContext, name: str) -> stage.Stage | None:
    """The stage that reads what is to be freed of a source; None where the source has no such stage."""
    source = next(each for each in context.recipe.sources if each.name == name)
    hydrated = isinstance(source, HubSource) and source.needs_hydration
    if context.to_free == "hydrate" and not hydrated:
        return None
    after = {
        "fetch": "hydrate" if hydrated else "filter",
        "hydrate": "filter",
        "filter": "tokenize",
        "tokenize": "shuffle",
    }
    return context.stage(after[str(context.to_free)], (name,))


STAGES: Mapping[str, Callable[[RunContext], None]] = {
    "plan": _plan,
    "fetch": _fetch,
    "hydrate": _hydrate,
    "filter": _filter,
    "tokenize": _tokenize,
    "shuffle": _shuffle,
    "manifest": _manifest,
    "verify": _verify,
    "stats": _stats,
    "free": _free,
}
TO_SHARDS = ("plan", "fetch", "hydrate", "filter", "tokenize", "shuffle")  # `manifest` follows
