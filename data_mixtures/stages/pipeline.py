"""The stages in order, and how each is run over the sources of a recipe."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from data_mixtures import recipe_file, store, tokenizer
from data_mixtures.recipe import Recipe, TokenizerFile, check_known
from data_mixtures.stages import (
    decontaminate,
    manifest,
    plan,
    quality,
    stage,
    stats,
    tokenize,
    verify,
)
from data_mixtures.stages.containment import Contained, HeldOut, Scan
from data_mixtures.stages.dedup import Bands, Dedup, Signatures
from data_mixtures.stages.fetch import Fetch, check_dropped, check_enough, sum_lost_files
from data_mixtures.stages.filter import Filter
from data_mixtures.stages.run import Options, figures, run_units, summary
from data_mixtures.stages.shuffle import OrderDocuments, WriteShards
from data_mixtures.stages.sorted_runs import Runs
from records.workers import usable_cpus

# the server that forks the workers has imported every stage, and pandas, which pyarrow looks for
# when first used
multiprocessing.set_forkserver_preload([__name__, "pandas"])
# a stage whose files can be freed, and the stage that consumes them
CONSUMER_OF: Mapping[str, type[stage.Stage]] = {
    "fetch": Filter,
    "filter": tokenize.Tokenize,
    "tokenize": Runs,
    "runs": WriteShards,
}


@dataclass(frozen=True)
class RunContext:
    recipe: Recipe
    out: Path
    sources: tuple[str, ...]
    options: Options
    console: Console
    mirror: str | None = None  # where files come from instead of the hub
    budget_bytes: int | None = None  # of all that DIR/fetch may hold
    replace: bool = False  # even if other data replace what a lock pins
    tables: bool = True  # print one after each stage

    @property
    def scope(self) -> tuple[Recipe, Path, tuple[str, ...]]:
        """The first arguments of every stage, and of what plans, checks and publishes."""
        return self.recipe, self.out, self.sources

    @property
    def threads(self) -> int:
        # for what runs in this process, wherever units run
        return self.options.workers if self.options.kind == "local" else usable_cpus()

    def run(self, kind: Callable[..., stage.Stage], *arguments: Any) -> None:
        work = kind(*self.scope, *arguments)
        receipts = run_units(work, self.options, self.console)
        if self.tables and receipts:
            self.console.print(summary(work.name, receipts))


@contextmanager
def open_run(
    recipe_path: Path,
    out: Path,
    options: Options,
    console: Console,
    sources: str = "",
    **settings: Any,
) -> Iterator[RunContext]:
    """Lock a recipe's data folder and yield the context of its stages.

    Args:
        sources: names, separated by commas; default: all.
        settings: the other fields of `RunContext`.
    """
    recipe = recipe_file.load(recipe_path)
    all_names = tuple(source.name for source in recipe.sources)
    names = tuple(sources.split(",")) if sources else all_names
    check_known("source", names, all_names)
    if recipe.corpus and (url := store.url_of(out)):
        raise ValueError(
            f"corpus = {recipe.corpus!r} writes files to a folder, and --out is {url}: run it alone, copy what it "
            "writes behind a URL, and name that in the inputs; or give a folder as --out"
        )
    with stage.exclusive(out) as folder:
        yield RunContext(recipe, folder, names, options, console, **settings)


def do(context: RunContext, name: str) -> None:
    """Run a stage of TO_SHARDS; ValueError if other data would replace what a lock pins."""
    if not context.replace:
        manifest.check_pinned(*context.scope)
    TO_SHARDS[name](context)


def publish(context: RunContext) -> dict[str, str]:
    """Run the stage `manifest`; return "built" or "reused" by source."""
    return manifest.write(*context.scope, context.console, context.replace)


def _check_later_stages(recipe: Recipe) -> None:
    # early, before the first stages take days
    if isinstance(recipe.tokenizer, TokenizerFile):
        tokenizer.check_exportable(recipe.tokenizer)
    for source in recipe.sources:
        quality.load(quality.steps_of(recipe, source.name))


def _plan(context: RunContext) -> None:
    _check_later_stages(context.recipe)
    # `filter` makes it again if the files changed; here a benchmark that is missing is seen early
    decontaminate.make_index(context.recipe.filter.benchmarks, context.out)
    planned = plan.make(*context.scope, context.mirror)
    plans = {name: planned["sources"][name] for name in context.sources}
    units = sum(len(source_plan["units"]) for source_plan in plans.values())
    context.console.print(f"plan     {units:6} units of {len(plans)} sources")
    for sentence in plan.describe_shared_files(planned):
        context.console.print(f"note: {sentence}", style="yellow", soft_wrap=True, markup=False)
    if context.tables:
        terms = ("revision", "gate", "licence")
        rows = []
        for name, source_plan in plans.items():
            size = sum(map(plan.size_of, source_plan["units"]))
            rows.append(
                [
                    name,
                    len(source_plan["units"]),
                    size,
                    *(source_plan.get(key, "") for key in terms),
                ]
            )
        context.console.print(figures(None, ("source", "units", "bytes", *terms), rows))


def _fetch(context: RunContext) -> None:
    work = Fetch(*context.scope, context.mirror)
    work.check_room(context.budget_bytes)
    context.run(Fetch, context.mirror)
    work.remove_parts()
    fetched = {name: stage.counts(context.out, "fetch", name) for name in context.sources}
    lost_files = {name: {"lost": sum_lost_files(counts)} for name, counts in fetched.items()}
    stats.print_lost_files(lost_files, context.console)
    check_dropped(*context.scope, ("fetch",))
    check_enough(*context.scope)


def _filter(context: RunContext) -> None:
    decontaminate.make_index(context.recipe.filter.benchmarks, context.out)
    context.run(Filter)
    check_dropped(*context.scope, ("fetch", "filter"))


def _dedup(context: RunContext) -> None:
    # signatures of the requested sources; near copies over all sources of the recipe
    settings = context.recipe.dedup
    near = (Signatures, Bands, Dedup) if settings.minhash else ()
    inside = (HeldOut, Scan, Contained) if settings.contained_share > 0 else ()
    for kind in (*near, *inside):
        context.run(kind)


def _tokenize(context: RunContext) -> None:
    tokenize.make_tokenizer(context.recipe, context.out)
    context.run(tokenize.Tokenize)


def _runs(context: RunContext) -> None:
    if Runs(*context.scope).units():
        context.run(Runs)


def _shuffle(context: RunContext) -> None:
    context.run(OrderDocuments)
    context.run(WriteShards)


def check_data(context: RunContext, recipe_path: Path) -> None:
    """Run the stage `verify`; ValueError for damage, with the commands that restore the files."""
    damage = verify.verify(context.out, context.sources, context.console, context.threads)
    if damage:
        commands = "\n  ".join(verify.remedy(recipe_path, context.out, damage))
        raise ValueError(
            f"{len(damage)} damaged, named above. Restore these files from a copy, or make them again from their "
            "units, with the same bytes (with the options of the first preparation, such as --mirror):\n"
            f"  {commands}"
        )


def free(context: RunContext, name: str) -> None:
    """Delete a stage's files, if the stage that reads them has done all units."""
    for source in context.sources:
        of_source = context.recipe, context.out, (source,)
        merged = Runs(*of_source).units()
        units = merged if name == "runs" else stage.list_units(context.out, source)
        # without a merge, `runs` has no units: the shards are made of the tokenized units themselves
        consumer = CONSUMER_OF["runs" if name == "tokenize" and not merged else name](*of_source)
        if pending := sum(not stage.is_done(consumer, unit) for unit in consumer.units()):
            raise ValueError(
                f"{name} of {source!r} is still needed: {pending} units are not through {consumer.name}"
            )
        freed = sum(stage.free(context.out, name, unit) for unit in units)
        context.console.print(f"{source}: {freed:,} bytes of {name} are free")


# in their order; `manifest` follows
TO_SHARDS: Mapping[str, Callable[[RunContext], None]] = {
    "plan": _plan,
    "fetch": _fetch,
    "filter": _filter,
    "dedup": _dedup,
    "tokenize": _tokenize,
    "runs": _runs,
    "shuffle": _shuffle,
}
