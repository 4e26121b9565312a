"""The manifest of a source: its finished shards under DIR/<source>/, described by source.json.

Every document read is accounted for: read == kept + sum(dropped). Locks pin the manifest's identity,
`shards.content_sha256`.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from data_mixtures import mixture, shards, store, tokenizer
from data_mixtures.recipe import Recipe, TokenizerTraining
from data_mixtures.shards import Json
from data_mixtures.stages import shuffle, stage
from data_mixtures.stages.fetch import sum_lost_files
from data_mixtures.stages.stage import Unit, receipts
from records.files import code_version, file_sha256

# what decides the data of a source beside its plan; kept in source.json, so that `check_pinned` sees
# a change before anything is made. No cache key: those are `Stage.result_key`
_PIN_GUARDED = (
    "seed",
    "seq_len",
    "windows_per_shard",
    "max_document_chars",
    "filter",
    "dedup",
    "steps",
    "keep",
)


def write(
    recipe: Recipe, out: Path, sources: tuple[str, ...], console: Console, replace: bool = False
) -> dict[str, str]:
    """Publish every source and pin every phase of the recipe; return "built" or "reused" by source.

    Raises:
        ValueError: an earlier stage is not finished, counts do not add up, or a lock pins other data.
    """
    outcomes = {}
    for source in sources:
        outcomes[source] = _publish(recipe, out, source, replace)
        console.print(f"{out / source}: {outcomes[source]}", soft_wrap=True)
    settings = recipe.seed, recipe.seq_len, recipe.epoch_cap, recipe.packing
    for phase, weights in recipe.phases.items():
        missing = [name for name in weights if not (out / name / shards.MANIFEST).is_file()]
        absent = f"{phase} is not pinned yet: {', '.join(missing)} not prepared"
        console.print(
            absent if missing else f"{mixture.pin(out, phase, weights, *settings)}", soft_wrap=True
        )
    return outcomes


def check_pinned(recipe: Recipe, out: Path, sources: tuple[str, ...]) -> None:
    """Raise ValueError when the recipe or plan asks for other data than a lock pins."""
    for source in sources:
        published = _manifest(out / source)
        locks = [
            name
            for name, pin in _pins(out, source).items()
            if pin == published.get("content_sha256")
        ]
        current = _collect_guarded(recipe, out, source)
        recorded = published.get("recipe", {})
        other = [key for key in recorded if current.get(key, recorded[key]) != recorded[key]]
        if locks and other:
            differ = "; ".join(f"{key} = {recorded[key]!r}, now {current[key]!r}" for key in other)
            raise ValueError(
                f"{out / source} is pinned by {', '.join(locks)} and was made with {differ}: other data would replace "
                "it, and a run of that lock could not go on. Nothing was done; use another --out, or give --replace"
            )


def _manifest(folder: Path) -> Json:
    with suppress(ValueError):
        return shards.read_manifest(folder)
    return {}


def _collect_guarded(recipe: Recipe, out: Path, source: str) -> Json:
    every = {**asdict(recipe), **asdict(recipe.source(source))}
    guarded = {key: value for key, value in every.items() if key in _PIN_GUARDED}
    guarded["valid_per_10000"] = recipe.valid_per_10000_of(source)
    # paths may move without other data; the index has a hash of its own
    del guarded["filter"]["benchmarks"]
    if not guarded["dedup"]["contained_share"]:
        # manifests from before this key must still match
        del guarded["dedup"]["contained_share"]
    if isinstance(tokenizer_settings := recipe.tokenizer, TokenizerTraining):
        guarded["tokenizer"] = [asdict(tokenizer_settings), [item.name for item in recipe.sources]]
    else:
        path = Path(tokenizer_settings.path)
        guarded["tokenizer"] = (
            [file_sha256(path), tokenizer_settings.bos, tokenizer_settings.eos]
            if path.is_file()
            else None
        )
    # a source that is not planned yet has no hash
    with suppress(ValueError):
        guarded["plan"] = stage.find_plan(out, source)["plan_hash"]
    # tuples become lists, as in source.json
    return json.loads(json.dumps(guarded))


def _pins(out: Path, source: str) -> dict[str, str]:
    """Return the content of a source that each lock pins."""
    by_lock: dict[str, str] = {}
    for path in sorted(out.glob("*.lock.json")):
        # a broken lock pins nothing
        with suppress(ValueError):
            pins = {
                entry["name"]: entry["content_sha256"]
                for entry in mixture.read_lock(path)["sources"]
            }
            if source in pins:
                by_lock[path.name] = pins[source]
    return by_lock


def _refuse_other_data(out: Path, source: str, description: Json) -> None:
    published = _manifest(out / source)
    new = shards.content_sha256(description)
    pins = _pins(out, source).items()
    if locks := [
        name for name, pin in pins if pin != new and pin == published.get("content_sha256", pin)
    ]:
        raise ValueError(
            f"{out / source} holds data that {', '.join(locks)} pins, and other data was prepared for it; it was not "
            "published. --replace does that, and a run of that lock cannot go on; or use another --out"
        )


def _publish(recipe: Recipe, out: Path, source: str, replace: bool) -> str:
    count = len(shuffle.WriteShards(recipe, out, (source,)).units())
    written = receipts(out, shuffle.SHUFFLE, source, count)
    description = _description(recipe, out, source, written)
    if remote := store.of(out):
        return _publish_there(remote, out, source, description, written, replace)
    files = {
        name: stage.unit_folder(out, shuffle.SHUFFLE, Unit(source, number)) / name
        for number, receipt in enumerate(written)
        for name in receipt["files"]
    }
    final = out / source
    published = _manifest(final)
    with suppress(ValueError, FileNotFoundError):
        shards.check_sizes(final, description)
        is_same = published.get("content_sha256") == shards.content_sha256(description)
        if is_same and all(_is_copy(final / name, path) for name, path in files.items()):
            described = {**published, **description, "code_version": published["code_version"]}
            # the same data, but its counts or its plan changed
            if described != published:
                shards.write_manifest(final, described)
            return "reused"
    if not replace:
        _refuse_other_data(out, source, description)
    partial = out / f".{source}.partial"
    # left by a run that was killed
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        for name, path in files.items():
            # hard links, or copies where the file system cannot link; one rename publishes them all
            _link(path, partial / name)
        shards.write_manifest(partial, description)
        shards.publish(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return "built"


def _is_copy(link: Path, path: Path) -> bool:
    ours = link.stat()
    theirs = path.stat() if path.exists() else link.stat()
    return (ours.st_size, ours.st_mtime_ns) == (theirs.st_size, theirs.st_mtime_ns)


def _publish_there(
    remote: store.Store,
    out: Path,
    source: str,
    description: Json,
    written: tuple[Json, ...],
    replace: bool,
) -> str:
    final = out / source
    sizes = remote.sizes(out / source)
    names = {shards.MANIFEST}
    unpublished = dict[Unit, Json]()
    for unit, receipt in (
        (Unit(source, number), receipt) for number, receipt in enumerate(written)
    ):
        names |= receipt["files"].keys()
        if not receipt.get("freed"):
            unpublished[unit] = receipt["files"]
        elif any(sizes.get(name) != entry["bytes"] for name, entry in receipt["files"].items()):
            stage.forget(out, shuffle.SHUFFLE, unit)
            raise ValueError(
                f"{remote.url}/{source} lacks files of {unit}; start again: it makes them"
            )
    published = _manifest(final)
    is_same = (
        published.get("content_sha256") == shards.content_sha256(description) and not unpublished
    )
    made_by = {"code_version": published["code_version"]} if is_same else {}
    if not is_same:
        if not replace:
            _refuse_other_data(out, source, description)
        remote.remove([final / shards.MANIFEST])
    # a store has no links: files move from their units, and source.json is written last
    for unit, files in unpublished.items():
        for name in files:
            remote.copy(stage.unit_folder(out, shuffle.SHUFFLE, unit) / name, final / name)
        stage.free(out, shuffle.SHUFFLE, unit)
    remote.remove(final / name for name in sizes.keys() - names)
    final.mkdir(exist_ok=True)
    shards.write_manifest(final, {**description, **made_by})
    remote.put(final / shards.MANIFEST)
    return "reused" if is_same else "built"


_code_version = functools.cache(functools.partial(code_version, Path(__file__).parents[1]))


def _link(path: Path, link: Path) -> None:
    if not path.is_file():
        raise ValueError(
            f"{path} is missing, so {link.name} is not published; run {shuffle.SHUFFLE!r} again"
        )
    try:
        os.link(path, link)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(path, link)


def _description(recipe: Recipe, out: Path, source: str, written: tuple[Json, ...]) -> Json:
    *train, valid = (receipt["counts"] for receipt in written)
    train = [entry for entry in train if entry["windows"]]
    return {
        "source": source,
        "category": recipe.source(source).category,
        "recipe": _collect_guarded(recipe, out, source),
        "plan_hash": stage.find_plan(out, source)["plan_hash"],
        "code_version": _code_version(),
        **shuffle.layout(recipe, source),
        **_token_facts(out, source, (*train, valid)),
        **_counts(out, source),
        "unused": _count_unused(recipe, out, source, train, valid),
        "contamination": _contamination(out, source),
        "windows": sum(entry["windows"] for entry in train),
        "shards": train,
        "valid": valid,
    }


def _token_facts(out: Path, source: str, entries: tuple[Json, ...]) -> Json:
    """Return the tokenizer's facts; ValueError if the shards have another token width."""
    facts = tokenizer.facts(shards.tokenizer_path(out))
    widths = {shards.token_dtype(entry).itemsize for entry in entries if entry["tokens"]}
    if widths - {facts["token_bytes"]}:
        raise ValueError(
            f"{out / shuffle.SHUFFLE / source} was made with another tokenizer; run 'tokenize' again"
        )
    return facts


def _counts(out: Path, source: str) -> Json:
    fetched = (
        stage.counts(out, "fetch", source)
        if stage.read_receipt(out, "fetch", Unit(source, 0))
        else []
    )
    filtered, tokenized = (stage.counts(out, name, source) for name in ("filter", "tokenize"))
    ordered = _read_order_counts(out, source)
    parts = [counts[part] for counts in ordered for part in ("train", "valid")]
    totals = {name: sum(part[name] for part in parts) for name in ("documents", "tokens", "bytes")}
    dropped = Counter[str]()
    for counts in fetched:
        dropped.update(counts.get("dropped", {}))
    read = dropped.total() + sum(counts["read"] for counts in filtered)
    for counts in (*filtered, *tokenized):
        dropped.update(counts["dropped"])
    dropped["duplicate"] = sum(counts["duplicate"] for counts in ordered)
    tokenized_documents = sum(
        counts["documents"] + sum(counts["dropped"].values()) for counts in tokenized
    )
    if tokenized_documents != sum(counts["kept"] for counts in filtered):
        raise ValueError(
            f"source {source!r} was filtered again after it was tokenized; run the later stages"
        )
    if read != totals["documents"] + dropped.total():
        raise ValueError(
            f"source {source!r}: {read} documents were read, {totals['documents']} are kept and {dropped.total()} are "
            f"counted as dropped ({dict(dropped)}); receipts of different runs are mixed, run the stages again"
        )
    return {
        **totals,
        "longest": max(part["longest"] for part in parts),
        "read": read,
        "cut": sum(counts["cut"] for counts in filtered),
        "without_nuls": sum(counts.get("nuls", 0) for counts in filtered),
        "without_surrogates": sum(counts.get("lone_surrogates", 0) for counts in fetched),
        "kept": totals["documents"],
        "dropped": dict(sorted(dropped.items())),
        "lost": sum_lost_files(fetched),
    }


def _read_order_counts(out: Path, source: str) -> list[Json]:
    return stage.counts(out, shuffle.ORDER, source, len(shuffle.ranges_of(out, source)))


def _count_unused(recipe: Recipe, out: Path, source: str, train: list[Json], valid: Json) -> Json:
    """Count what lies after the last window: train_tokens, valid_tokens and train_documents.

    Packed windows lose nothing; for them it counts the padding tokens.
    """
    if recipe.packing != mixture.PACKING:
        return {"train_tokens": 0, "padding": sum(entry["padding"] for entry in (*train, valid))}
    unused = dict[str, int]()
    ordered = _read_order_counts(out, source)
    for part, files in (("train", train), ("valid", [valid])):
        windows = sum(entry["windows"] for entry in files)
        tokens = sum(counts[part]["tokens"] for counts in ordered)
        unused[f"{part}_tokens"] = tokens - windows * recipe.seq_len - bool(windows)
    begun = sum(entry["docs"]["documents"] for entry in train)
    documents = sum(counts["train"]["documents"] for counts in ordered)
    return {**unused, "train_documents": documents - begun}


def _contamination(out: Path, source: str) -> Json:
    """Return {benchmark: {"documents": dropped for it, "items": how many of its items they held}}."""
    documents = Counter[str]()
    items = dict[str, set[str]]()
    for counts in stage.counts(out, "filter", source):
        for benchmark, entry in counts["contamination"].items():
            documents[benchmark] += entry["documents"]
            items.setdefault(benchmark, set()).update(entry["items"])
    return {
        name: {"documents": documents[name], "items": len(items[name])} for name in sorted(items)
    }
