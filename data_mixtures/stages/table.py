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
from data_mixtures.stages import (
    decontaminate,
    execute,
    manifest,
    plan,
    quarantine,
    shuffle,
    stage,
    tokenize_units,
    verify,
)
from data_mixtures.stages.fetch import Fetch, check_enough
from data_mixtures.stages.filter import Filter
from data_mixtures.stages.hydrate import Hydrate

FREEABLE = ("fetch", "hydrate", "filter", "tokenize")


@dataclass(frozen=True)
class Way:
    """What a stage is run on.

    mirror: where files come from instead of the hub. budget_bytes: how much `fetch` may hold. to_free: the stage whose
    files `free` deletes. quarantine: whether `verify` takes damaged shards out of their manifests. sequences: how many
    of each phase, for the epochs in `stats`.
    """

    recipe: Recipe
    out: Path
    sources: tuple[str, ...]
    executor: execute.Executor
    console: Console
    mirror: str | None = None
    budget_bytes: int | None = None
    to_free: str | None = None
    quarantine: bool = False
    sequences: Mapping[str, int] | None = None
    tables: bool = True

    def run(self, work: stage.Stage) -> None:
        receipts = execute.run(work, self.executor, self.console)
        if self.tables and receipts:
            self.console.print(execute.summary(work.name, receipts))

    def stage(self, name: str, sources: tuple[str, ...]) -> stage.Stage:
        if name == "fetch":
            return Fetch(self.recipe, self.out, sources, self.mirror)
        kinds = {"hydrate": Hydrate, "filter": Filter, "tokenize": tokenize_units.Tokenize, "shuffle": shuffle.Shuffle}
        return kinds[name](self.recipe, self.out, sources)


def check(recipe: Recipe, out: Path) -> None:
    """What the last stages need is there, before the first ones take days. ValueError says what is not."""
    if isinstance(recipe.tokenizer, Path):
        tokenizer.load(recipe.tokenizer)
    decontaminate.make_index(recipe.filter.benchmarks, out)
    Hydrate(recipe, out, tuple(each.name for each in recipe.sources)).check()


def _plan(way: Way) -> None:
    made = plan.make(way.recipe, way.out, way.sources, way.mirror)["sources"]
    units = sum(len(made[name]["units"]) for name in way.sources)
    way.console.print(f"plan     {units:6} units of {len(way.sources)} sources", highlight=False)
    if not way.tables:
        return
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for name in ("source", "units", "bytes", "revision", "gate", "licence"):
        table.add_column(name, justify="right" if name in ("units", "bytes") else "left")
    for name in way.sources:
        planned = made[name]
        size = sum(unit["bytes"] if unit["kind"] == "parquet" else _bytes(unit) for unit in planned["units"])
        facts = (planned.get(key, "") for key in ("revision", "gate", "licence"))
        table.add_row(name, f"{len(planned['units']):,}", f"{size:,}", *facts)
    way.console.print(table)


def _bytes(unit: plan.Entry) -> int:
    return sum(size for _, size, _ in unit["files"])


def _fetch(way: Way) -> None:
    work = Fetch(way.recipe, way.out, way.sources, way.mirror)
    work.check_room(way.budget_bytes)
    way.run(work)
    check_enough(way.recipe, way.out, way.sources)


def _hydrate(way: Way) -> None:
    work = way.stage("hydrate", way.sources)
    if work.units():
        way.run(work)


def _filter(way: Way) -> None:
    decontaminate.make_index(way.recipe.filter.benchmarks, way.out)
    way.run(way.stage("filter", way.sources))


def _tokenize(way: Way) -> None:
    tokenize_units.make_tokenizer(way.recipe, way.out)
    way.run(way.stage("tokenize", way.sources))


def _shuffle(way: Way) -> None:
    way.run(shuffle.Order(way.recipe, way.out, way.sources))
    way.run(way.stage("shuffle", way.sources))


def _manifest(way: Way) -> None:
    manifest.write(way.recipe, way.out, way.sources, way.console)


def _verify(way: Way) -> None:
    report = verify.verify(way.out, way.sources, way.console, way.executor.options.workers)
    if way.quarantine and report.damage:
        quarantine.quarantine(way.out, report.damage, way.console)
    elif report.damage:
        raise ValueError(
            f"{len(report.damage)} damaged, named above; --quarantine takes damaged shards out of the data"
        )


def _stats(way: Way) -> None:
    from data_mixtures.stages import stats  # plotly takes half a second, which the other commands need not wait for

    stats.write(way.out, way.sources, way.console, way.sequences, workers=way.executor.options.workers)


def _free(way: Way) -> None:
    """Delete the files of a stage, source by source, where all units have been through the stage that reads them."""
    if way.to_free is None:
        raise ValueError(f"free needs --stage, one of {', '.join(FREEABLE)}")
    for name in way.sources:
        if (reader := _reader(way, name)) is None:
            continue
        if left := [unit for unit in reader.units() if not stage.is_done(reader, unit)]:
            raise ValueError(
                f"{way.to_free} of {name!r} is still needed: {len(left)} units are not through {reader.name}"
            )
        freed = sum(stage.free(way.out, way.to_free, unit) for unit in plan.units(way.out, name))
        way.console.print(f"{name}: {freed:,} bytes of {way.to_free} are free", highlight=False)


def _reader(way: Way, name: str) -> stage.Stage | None:
    """The stage that reads what is to be freed of a source; None where the source has no such stage."""
    source = next(each for each in way.recipe.sources if each.name == name)
    hydrated = isinstance(source, HubSource) and source.needs_hydration
    if way.to_free == "hydrate" and not hydrated:
        return None
    after = {
        "fetch": "hydrate" if hydrated else "filter",
        "hydrate": "filter",
        "filter": "tokenize",
        "tokenize": "shuffle",
    }
    return way.stage(after[str(way.to_free)], (name,))


STAGES: Mapping[str, Callable[[Way], None]] = {
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
TO_SHARDS = ("plan", "fetch", "hydrate", "filter", "tokenize", "shuffle")  # and the manifest, which says what was made
