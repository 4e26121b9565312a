"""`python -m data_mixtures.prepare RECIPE.toml --out DIR`: text on this machine -> token shards, manifests, lock files.

    DIR/tokenizer.model
    DIR/<source>/source.json, shard-NNNNN.bin, shard-NNNNN.docs.zst, valid.bin
    DIR/phase1.lock.json, DIR/phase2.lock.json, ...

The same texts give the same bytes, whatever the number of workers. A finished part whose recipe, files and code have
not changed is reused; every part is written under another name and renamed when it is whole.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from data_mixtures import collect, mixture, recipe, shards, tokenizer

RECEIPT = "receipt.json"  # how this machine made the source: only for reuse, not part of the data
TOKENIZER = "tokenizer.model"
_CODE = ("collect.py", "generated.py", "manpages.py", "phrases.toml", "shards.py", "texts.py", "tokenizer.py")


def code_version() -> str:
    """A hash of the modules that decide the bytes of a source; a change in them rebuilds it."""
    folder = Path(__file__).parent
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in _CODE)).hexdigest()[:16]


def prepare(recipe_path: Path, out: Path, workers: int, console: Console) -> None:
    """The whole way. ValueError for a wrong recipe or missing text; the folder then keeps what was finished."""
    plan = recipe.load(recipe_path)
    sources = _local_sources(recipe_path, plan)
    layout = shards.Layout(plan.seed, plan.seq_len, plan.windows_per_shard, plan.valid_per_10000)
    out.mkdir(parents=True, exist_ok=True)
    console.print(f"preparing {recipe_path} -> {out}")
    with _exclusive(out), _progress(console) as progress, _pool(workers) as pool:
        job = _Job(plan, sources, layout, out, pool, progress)
        _make_tokenizer(job)
        made = [_make_source(job, source) for source in sources]
        locks = [mixture.write_lock(out, phase, plan) for phase in plan.phases]
    console.print(_summary(out, plan, made))
    for lock, weights in zip(locks, plan.phases.values(), strict=True):
        shares = ", ".join(f"{name} {100 * weight / sum(weights.values()):.2f} %" for name, weight in weights.items())
        console.print(f"{lock}: {shares}", soft_wrap=True, highlight=False)


@dataclass(eq=False)
class _Job:
    plan: recipe.Recipe
    sources: tuple[recipe.LocalSource, ...]
    layout: shards.Layout
    out: Path
    pool: Executor | None
    progress: Progress

    @functools.cached_property
    def stamps(self) -> dict[str, str]:
        return {source.name: collect.stamp(source) for source in self.sources}

    @functools.cached_property
    def tokenizer_key(self) -> str:
        """What the tokenizer depends on: its own bytes when it is given, otherwise all text it could be trained on."""
        training = self.plan.tokenizer
        if isinstance(training, Path):
            tokenizer.load(training)
            return tokenizer.sha256(training)
        return _key(
            asdict(training), self.plan.max_document_chars, [asdict(source) for source in self.sources], self.stamps
        )

    def source_key(self, source: recipe.LocalSource) -> str:
        limit = self.plan.max_document_chars
        return _key(asdict(source), limit, self.stamps[source.name], asdict(self.layout), self.tokenizer_key)

    @functools.cache  # noqa: B019 - one job lives as long as the program
    def texts(self, source: recipe.LocalSource) -> tuple[list[str], Counter[str]]:
        task = self.progress.add_task(f"reading {source.name}", total=None)
        found = collect.collect(source, self.plan.max_document_chars, self.pool)
        self.progress.remove_task(task)
        return found


def _key(*parts: Any) -> str:
    return hashlib.sha256(json.dumps([code_version(), *parts], sort_keys=True, default=str).encode()).hexdigest()


def _local_sources(path: Path, plan: recipe.Recipe) -> tuple[recipe.LocalSource, ...]:
    hub = [source for source in plan.sources if isinstance(source, recipe.HubSource)]
    if not hub:
        return tuple(source for source in plan.sources if isinstance(source, recipe.LocalSource))
    hydrate = [source.name for source in hub if source.needs_hydration]
    raise ValueError(
        f"{path} describes {len(hub)} datasets of the hub ({hub[0].repo} @ {hub[0].revision} and others). Missing: the "
        "fetch stage that plans, downloads and verifies their Parquet files"
        + (f", and the hydration of {', '.join(hydrate)}, which list files without their text" if hydrate else "")
        + ". It is not built yet; data_mixtures/demo.toml is made of text on this machine and works now"
    )


def _make_tokenizer(job: _Job) -> None:
    path, receipt, training = job.out / TOKENIZER, job.out / f"tokenizer.{RECEIPT}", job.plan.tokenizer
    if path.is_file() and _receipt(receipt) == {"key": job.tokenizer_key, "sha256": tokenizer.sha256(path)}:
        return
    if isinstance(training, Path):
        model = training.read_bytes()
    else:
        sample = _training_sample(job, training.train_bytes)
        task = job.progress.add_task("training the tokenizer", total=None)
        model = tokenizer.train(sample, training)
        job.progress.remove_task(task)
    partial = path.with_name(f".{TOKENIZER}.partial")
    partial.write_bytes(model)
    partial.replace(path)
    shards.write_json(receipt, {"key": job.tokenizer_key, "sha256": tokenizer.sha256(path)})


def _training_sample(job: _Job, train_bytes: int) -> list[str]:
    """Training documents of every source in their shuffled order, up to the source's share of train_bytes by size."""
    sizes = {source.name: sum(map(len, job.texts(source)[0])) for source in job.sources}
    sample = []
    for source in job.sources:
        budget = train_bytes * sizes[source.name] // sum(sizes.values())
        for text in shards.select(job.texts(source)[0], job.layout).train:
            if budget <= 0:
                break
            sample.append(text)
            budget -= len(text)
    return sample


def _make_source(job: _Job, source: recipe.LocalSource) -> str:
    """Build one source, or keep it; returns "built" or "reused"."""
    final, key = job.out / source.name, job.source_key(source)
    if _receipt(final / RECEIPT) == {"key": key} and _complete(final):
        return "reused"
    texts, dropped = job.texts(source)
    partial = job.out / f".{source.name}.partial"
    partial.mkdir()
    try:
        manifest = _write_source(job, source, partial, texts, dropped)
        shards.write_json(partial / shards.MANIFEST, manifest)
        shards.write_json(partial / RECEIPT, {"key": key})
        shards.publish(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return "built"


def _write_source(
    job: _Job, source: recipe.LocalSource, folder: Path, texts: list[str], dropped: Counter[str]
) -> dict[str, Any]:
    layout, selection = job.layout, shards.select(texts, job.layout)
    tokens, lengths = _tokenize(job, f"tokenizing {source.name}", selection.train)
    valid_tokens, valid_lengths = _tokenize(job, f"tokenizing {source.name} (held out)", selection.valid)
    train = shards.write_train(folder, tokens, lengths, selection.train_ids, layout)
    valid = shards.write_windows(folder / shards.VALID, valid_tokens, layout.seq_len)
    for part, windows in (("training", train["windows"]), ("held-out", valid["windows"])):
        if not windows:
            raise ValueError(
                f"source {source.name!r} has too little text for one {part} window of {layout.seq_len} tokens: "
                "add text, or change seq_len or valid_per_10000"
            )
    kept = len(selection.train) + len(selection.valid)
    assert len(texts) == kept + selection.duplicates, "documents read must be kept or counted as dropped"
    return {
        "format": shards.FORMAT,
        "source": source.name,
        "category": source.category,
        "code_version": code_version(),
        **asdict(layout),
        "tokenizer_sha256": tokenizer.sha256(job.out / TOKENIZER),
        "vocab_size": tokenizer.load(job.out / TOKENIZER).vocab_size(),
        "documents": kept,
        "tokens": len(tokens) + len(valid_tokens),
        "bytes": sum(len(text.encode()) for text in (*selection.train, *selection.valid)),
        "dropped": {"duplicate": selection.duplicates, **dict(sorted(dropped.items()))},
        "windows": train["windows"],
        "shards": train["shards"],
        "valid": {**valid, "documents": len(valid_lengths)},
    }


def _tokenize(job: _Job, label: str, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    task = job.progress.add_task(label, total=len(texts))
    model, parts = str(job.out / TOKENIZER), []
    batches = list(shards.token_batches(texts))
    for batch, part in zip(batches, collect.ordered_map(job.pool, _encode, ((model, b) for b in batches)), strict=True):
        parts.append(part)
        job.progress.advance(task, len(batch))
    job.progress.remove_task(task)
    empty = (np.empty(0, "<u2"), np.empty(0, np.uint32))
    return tuple(np.concatenate(column) for column in zip(empty, *parts, strict=True))  # type: ignore[return-value]


def _encode(task: tuple[str, list[str]]) -> tuple[np.ndarray, np.ndarray]:
    model, texts = task
    return tokenizer.encode(_processor(model), texts)


@functools.cache
def _processor(model: str) -> sentencepiece.SentencePieceProcessor:
    return tokenizer.load(Path(model))


def _receipt(path: Path) -> dict[str, str] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None


def _complete(folder: Path) -> bool:
    try:
        shards.check_sizes(folder, shards.read_manifest(folder))
    except ValueError:
        return False
    return True


@contextmanager
def _exclusive(out: Path) -> Iterator[None]:
    """One preparation per folder at a time; then whatever a killed one left behind can go."""
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"another process is preparing {out}; wait for it, or use another --out") from error
        for left in (*out.glob(".*.partial"), *out.glob(".*.old")):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield


@contextmanager
def _pool(workers: int) -> Iterator[Executor | None]:
    if workers == 1:
        yield None
        return
    # spawn: forking a process whose progress bar runs in a thread can deadlock the child
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_end_with_parent) as pool:
        yield pool


def _end_with_parent() -> None:
    """In a worker: leave when the main process is gone; after a kill -9 it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only worker processes of a pool run this"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _progress(console: Console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _summary(out: Path, plan: recipe.Recipe, made: list[str]) -> Table:
    table = Table(box=box.SIMPLE, title=f"data in {out}", title_justify="left", pad_edge=False, collapse_padding=True)
    table.add_column("source", no_wrap=True)
    for column in ("docs", "dropped", "Mtokens", "MB", "B/tok", "windows", "valid", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for name, how in zip((source.name for source in plan.sources), made, strict=True):
        m = shards.read_manifest(out / name)
        counts = [f"{m['documents']:,}", f"{sum(m['dropped'].values()):,}"]
        sizes = [f"{m['tokens'] / 1e6:.2f}", f"{m['bytes'] / 1e6:.2f}", f"{m['bytes'] / m['tokens']:.2f}"]
        table.add_row(name, *counts, *sizes, f"{m['windows']:,}", f"{m['valid']['windows']:,}", how)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m data_mixtures.prepare", description=__doc__.split("\n")[0])
    parser.add_argument("recipe", type=Path, help="a recipe TOML, e.g. data_mixtures/demo.toml")
    parser.add_argument("--out", type=Path, required=True, help="the data folder to make")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes; never changes the result")
    arguments = parser.parse_args()
    try:
        recipe.check_integer("--workers", arguments.workers)
        prepare(arguments.recipe, arguments.out, arguments.workers, Console())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
