"""The stages in their order, and how each is run over the sources of a recipe."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from data_mixtures import tokenizer
from data_mixtures.recipe import Recipe, TokenizerFile
from data_mixtures.stages import (
    decontaminate,
    manifest,
    plan,
    quality,
    repair,
    shuffle,
    sorted_runs,
    stage,
    stats,
    tokenize,
    verify,
)
from data_mixtures.stages.dedup import Clusters, Links, Signatures
from data_mixtures.stages.fetch import Fetch, check_dropped, check_enough
from data_mixtures.stages.filter import Filter
from data_mixtures.stages.run import Options, figures, run_units, summary

# the server that forks the workers has imported every stage, and pandas, which pyarrow looks for
# when first used
multiprocessing.set_forkserver_preload([__name__, "pandas"])
# a stage whose files can be freed, and the stage that reads them
READERS: Mapping[str, type[stage.Stage]] = {
    "fetch": Filter,
    "filter": tokenize.Tokenize,
    "tokenize": sorted_runs.Runs,
    "runs": shuffle.WriteShards,
}


@dataclass(frozen=True)
class RunContext:
    """What a stage is run on.

    mirror: where files come from instead of the hub. budget_bytes: how much `fetch` may hold. to_free: the
    stage whose files `free` deletes. repair, quarantine: whether `verify` restores single blocks, and also
    takes the other damaged shards out of their manifests. sequences: how many of each phase, for the epochs
    in `stats`. tables: whether to print a table after every stage. replace: whether other data may replace
    what a lock pins.
    """

    recipe: Recipe
    out: Path
    sources: tuple[str, ...]
    options: Options
    console: Console
    mirror: str | None = None
    budget_bytes: int | None = None
    to_free: str | None = None
    repair: bool = False
    quarantine: bool = False
    sequences: Mapping[str, int] | None = None
    tables: bool = True
    replace: bool = False

    def do(self, name: str) -> None:
        """One stage. ValueError also when other data would replace what a lock pins, unless `replace`."""
        if name in TO_SHARDS and not self.replace:
            manifest.check_pinned(self.recipe, self.out, self.sources)
        STAGES[name](self)

    def publish(self) -> dict[str, str]:
        return manifest.write(self.recipe, self.out, self.sources, self.console, self.replace)

    def run(self, kind: Callable[..., stage.Stage], *more: Any) -> None:
        receipts = run_units(
            work := kind(self.recipe, self.out, self.sources, *more), self.options, self.console
        )
        if self.tables and receipts:
            self.console.print(summary(work.name, receipts))


def check(recipe: Recipe, out: Path) -> None:
    """Check what the last stages need before the first ones take days. ValueError says what is missing."""
    if isinstance(recipe.tokenizer, TokenizerFile):
        tokenizer.load_given(recipe.tokenizer)
    for source in recipe.sources:
        quality.load(quality.steps_of(recipe, source.name))
    decontaminate.make_index(recipe.filter.benchmarks, out)


def _plan(context: RunContext) -> None:
    planned = plan.make(context.recipe, context.out, context.sources, context.mirror)
    made = planned["sources"]
    units = sum(len(made[name]["units"]) for name in context.sources)
    context.console.print(f"plan     {units:6} units of {len(context.sources)} sources", highlight=False)
    for sentence in plan.shared(planned):
        context.console.print(f"note: {sentence}", style="yellow", soft_wrap=True, markup=False)
    rows = []
    for name in context.sources if context.tables else ():
        units = made[name]["units"]
        size = sum(unit.get("bytes", 0) + sum(file[1] for file in unit.get("files", ())) for unit in units)
        facts = (made[name].get(key, "") for key in ("revision", "gate", "licence"))
        rows.append([name, f"{len(units):,}", f"{size:,}", *facts])
    if rows:
        context.console.print(
            figures(None, ("source", "units", "bytes", "revision", "gate", "licence"), rows)
        )


def _fetch(context: RunContext) -> None:
    Fetch(context.recipe, context.out, context.sources, context.mirror).check_room(context.budget_bytes)
    context.run(Fetch, context.mirror)
    Fetch(context.recipe, context.out, context.sources).remove_parts()
    check_dropped(context.recipe, context.out, context.sources, ("fetch",))
    check_enough(context.recipe, context.out, context.sources)


def _filter(context: RunContext) -> None:
    decontaminate.make_index(context.recipe.filter.benchmarks, context.out)
    context.run(Filter)
    check_dropped(context.recipe, context.out, context.sources, ("fetch", "filter"))


def _dedup(context: RunContext) -> None:
    """Signatures of the sources that were asked for; near copies over all of the recipe's."""
    if context.recipe.dedup.minhash:
        for kind in (Signatures, Links, Clusters):
            context.run(kind)


def _tokenize(context: RunContext) -> None:
    tokenize.make_tokenizer(context.recipe, context.out)
    context.run(tokenize.Tokenize)


def _runs(context: RunContext) -> None:
    if sorted_runs.Runs(context.recipe, context.out, context.sources).units():
        context.run(sorted_runs.Runs)


def _shuffle(context: RunContext) -> None:
    context.run(shuffle.OrderDocuments)
    context.run(shuffle.WriteShards)


def _verify(context: RunContext) -> None:
    damage = verify.verify(context.out, context.sources, context.console, context.options.threads)
    if damage and (context.repair or context.quarantine):
        damage = repair.repair(damage, context.console)
    if context.quarantine and damage:
        verify.quarantine(context.out, damage, context.console)
    elif damage:
        raise ValueError(
            f"{len(damage)} damaged, named above; --repair restores single blocks of 16 MiB from parity, --quarantine "
            "does so and removes the other damaged shards from the data"
        )


def _stats(context: RunContext) -> None:
    workers = context.options.threads
    stats.write(context.out, context.sources, context.console, context.sequences, workers=workers)


def _free(context: RunContext) -> None:
    """Delete the files of a stage, source by source, if the stage that reads them has done all units."""
    if context.to_free is None:
        raise ValueError(f"free needs --stage, one of {', '.join(READERS)}")
    for source in context.sources:
        of_source = context.recipe, context.out, (source,)
        merged = sorted_runs.Runs(*of_source).units()
        units = merged if context.to_free == "runs" else stage.planned_units(context.out, source)
        kind = READERS[context.to_free]
        reader = (kind if merged or kind is not sorted_runs.Runs else shuffle.WriteShards)(*of_source)
        if left := [unit for unit in reader.units() if not stage.is_done(reader, unit)]:
            raise ValueError(
                f"{context.to_free} of {source!r} is still needed: {len(left)} units are not through {reader.name}"
            )
        freed = sum(stage.free(context.out, context.to_free, unit) for unit in units)
        context.console.print(f"{source}: {freed:,} bytes of {context.to_free} are free", highlight=False)


STAGES: Mapping[str, Callable[[RunContext], object]] = {
    "plan": _plan,
    "fetch": _fetch,
    "filter": _filter,
    "dedup": _dedup,
    "tokenize": _tokenize,
    "runs": _runs,
    "shuffle": _shuffle,
    "manifest": lambda context: context.publish(),
    "verify": _verify,
    "stats": _stats,
    "free": _free,
}
TO_SHARDS = ("plan", "fetch", "filter", "dedup", "tokenize", "runs", "shuffle")  # `manifest` follows
