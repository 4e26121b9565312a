"""verify: every byte of every source compared with its manifest, damage named by file and block.

One pass over a file gives its sha256, the hash of each 16 MiB block (which locates damage) and the positions
of `bos_id`, which must be where the document index says that documents begin. Locks are checked against
manifests. Threads suffice: hashing and searching release the interpreter lock.

`repair` restores single blocks. `quarantine` removes damaged shards from their manifest, with the reason, and
every lock that pins it gets a new fingerprint. No shard file is deleted. The shuffle receipt of such a shard
is deleted, so that the next preparation writes it again from the tokenized units, with the same bytes: then
manifest, locks and fingerprints are what they were before the damage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import xxhash
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from data_mixtures import mixture, shards
from data_mixtures.stages import shuffle, stage
from data_mixtures.stages.stage import Unit
from records.files import file_sha256
from records.workers import usable_cpus

AFTER_A_CHANGE = (
    "a job of the old fingerprint stops where it meets the damage; the new lock does not fit its checkpoints. Either "
    "prepare the data again, which writes the shard again and restores the old fingerprint, and resume; or start a new "
    "run from its weights with the new lock"
)
# of a whole shard: its number, where its first document begins, and where the one after its last
# would, in tokens
Span = tuple[int, int, int]


@dataclass(frozen=True)
class Damage:
    """Something that is not what it should be. block: number of the 16 MiB block, None for the
    file as a whole.
    """

    path: Path
    reason: str
    block: int | None = None

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.reason}"
            if self.block is None
            else f"{self.path}: block {self.block} {self.reason}"
        )


def verify(out: Path, sources: tuple[str, ...], console: Console, workers: int | None = None) -> list[Damage]:
    """Check all files of these sources and the locks beside them, and print what is
    wrong; nothing is changed.

    ValueError when a source has no readable manifest.
    """
    manifests = {source: shards.read_manifest(out / source) for source in sources}
    listed = [entry for manifest in manifests.values() for entry in shards.token_files(manifest)]
    size = sum(entry["bytes"] for entry in listed)
    found: list[Damage] = []
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
    with bar as progress, ThreadPoolExecutor(workers or usable_cpus()) as pool:
        task = progress.add_task("verifying", total=size)
        for source, manifest in manifests.items():
            folder, entries = out / source, shards.token_files(manifest)
            checks = pool.map(lambda entry, m=manifest, at=folder: _check_file(at, m, entry), entries)
            spans = []
            for entry, (damage, span) in zip(entries, checks, strict=True):
                found += damage
                spans.append(span)
                progress.advance(task, entry["bytes"])
            found += _check_source(folder, manifest, spans)
    found += _check_locks(out, manifests)
    for each in found:
        console.print(f"damaged: {each}", style="red", highlight=False, soft_wrap=True, markup=False)
    files = sum(len(shards.files_of(entry)) for entry in listed)
    console.print(f"{files} files, {size:,} bytes: {len(found)} damaged", highlight=False)
    return found


def _check_file(
    folder: Path, manifest: dict[str, Any], entry: dict[str, Any]
) -> tuple[list[Damage], Span | None]:
    """The tokens of a file, its document index, and both against each other."""
    damage, begins = _check_tokens(folder / entry["name"], entry, manifest["bos_id"])
    path = folder / entry["parity"]["name"]
    if not path.is_file() or xxhash.xxh3_64_hexdigest(path.read_bytes()) != entry["parity"]["xxh3"]:
        damage.append(Damage(path, "is missing or not the parity of its file"))
    if "docs" not in entry:
        return damage, None
    path = folder / entry["docs"]["name"]
    wrong, documents = _check_documents(path, entry["docs"])
    if begins is None or documents is None:
        return damage + wrong, None
    ids, lengths, _ = documents
    if (ids < np.uint64(shards.held_out_below(manifest["valid_per_10000"]))).any():
        wrong.append(Damage(path, "lists documents that are held out"))
    begins = begins[
        begins < entry["windows"] * manifest["seq_len"]
    ]  # the last token is the next shard's first as well
    first = int(begins[0]) if len(begins) else 0
    ends = first + np.cumsum(lengths, dtype=np.int64)
    if not np.array_equal(begins, ends - lengths):
        wrong.append(
            Damage(path, f"its documents do not begin at the token {manifest['bos_id']} in {entry['name']}")
        )
    number = shards.shard_number(entry["name"])
    at = number * manifest["windows_per_shard"] * manifest["seq_len"]
    span = (number, at + first, at + int(ends[-1])) if len(ends) and not wrong else None
    return damage + wrong, span


def _check_tokens(path: Path, entry: dict[str, Any], bos_id: int) -> tuple[list[Damage], np.ndarray | None]:
    if not path.is_file():
        return [Damage(path, f"missing; {entry['bytes']} bytes in the manifest")], None
    damage: list[Damage] = []
    begins: list[np.ndarray] = []
    whole, at, blocks, dtype = hashlib.sha256(), 0, iter(entry["xxh3_blocks"]), shards.token_dtype(entry)
    size = path.stat().st_size
    for block in shards.read_blocks(path, size):
        whole.update(block)
        expected = next(blocks, None)
        if expected != xxhash.xxh3_64_hexdigest(block):
            what = "lies behind the end" if expected is None else f"does not have its hash {expected}"
            damage.append(Damage(path, what if block else "cannot be read", len(begins)))
        tokens = np.frombuffer(block, dtype, len(block) // dtype.itemsize)
        begins.append(np.flatnonzero(tokens == bos_id) + at)
        at += len(tokens)
    if size != entry["bytes"]:
        damage.append(Damage(path, f"{size} bytes, {entry['bytes']} in the manifest: truncated or foreign"))
    elif whole.hexdigest() != entry["sha256"] and not damage:
        damage.append(Damage(path, f"sha256 {whole.hexdigest()}, {entry['sha256']} in the manifest"))
    return damage, None if damage else np.concatenate([np.empty(0, np.int64), *begins])


def _check_documents(path: Path, entry: dict[str, Any]) -> tuple[list[Damage], tuple[Any, ...] | None]:
    try:
        with pyarrow.CompressedInputStream(str(path), "zstd") as stream:
            data = stream.read()
    except FileNotFoundError:
        return [Damage(path, "missing")], None
    except OSError as error:
        return [Damage(path, f"cannot be unpacked ({error})")], None
    found = hashlib.sha256(data).hexdigest()
    if found != entry["sha256_uncompressed"]:
        return [
            Damage(path, f"unpacked sha256 {found}, {entry['sha256_uncompressed']} in the manifest")
        ], None
    documents = shards.unpack_documents(data)
    if (count := len(documents[0])) != entry["documents"]:
        return [Damage(path, f"{count} documents, {entry['documents']} in the manifest")], None
    return [], documents


def _check_source(folder: Path, manifest: dict[str, Any], spans: list[Span | None]) -> list[Damage]:
    """Checks across files: documents that continue in the next shard, counts, files that do not belong here."""
    damage: list[Damage] = []
    path = folder / shards.MANIFEST
    for left, right in pairwise(span for span in spans if span):
        if right[0] == left[0] + 1 and right[1] != left[2]:
            damage.append(
                Damage(
                    path,
                    f"shard {left[0]} lists documents up to token {left[2]}, shard {right[0]} from {right[1]}",
                )
            )
    windows = sum(entry["windows"] for entry in manifest["shards"])
    if windows != manifest["windows"]:
        damage.append(Damage(path, f"{manifest['windows']} windows, its shards have {windows}"))
    if manifest["read"] != manifest["kept"] + sum(manifest["dropped"].values()):
        damage.append(Damage(path, f"{manifest['read']} documents read are not those kept and dropped"))
    listed = [*shards.token_files(manifest), *manifest.get("quarantined", [])]
    known = {shards.MANIFEST, *(name for entry in listed for name in shards.files_of(entry))}
    return damage + [
        Damage(each, "not in the manifest") for each in sorted(folder.iterdir()) if each.name not in known
    ]


def _check_locks(out: Path, manifests: dict[str, dict[str, Any]]) -> list[Damage]:
    damage, path = [], shards.tokenizer_path(out)
    sha256 = file_sha256(path) if path.is_file() else None
    for source, manifest in manifests.items() if sha256 else ():
        if sha256 != manifest["tokenizer_sha256"]:
            damage.append(Damage(path, f"is not the tokenizer of {source} ({manifest['tokenizer_sha256']})"))
    for path in sorted(out.glob("*.lock.json")):
        try:
            lock = mixture.read_lock(path)
        except ValueError as error:
            damage.append(Damage(path, str(error)))
            continue
        for entry in lock["sources"]:
            folder = out / entry["name"]
            found = manifests.get(entry["name"], entry)["content_sha256"]
            if found != entry["content_sha256"]:
                damage.append(Damage(path, f"pins other data than that of {folder / shards.MANIFEST}"))
    return damage


def quarantine(out: Path, damage: Sequence[Damage], console: Console) -> None:
    """Remove damaged shards (as `verify` reports them) from their manifests, and pin the changed manifests.

    ValueError, and nothing is changed, when other files than shards are damaged, or a source would
    be left without any.
    """
    manifests = {
        path.parent.name: shards.read_manifest(path.parent) for path in out.glob(f"*/{shards.MANIFEST}")
    }
    reasons: dict[Path, list[str]] = {}
    for each in damage:
        reasons.setdefault(each.path, []).append(str(each).removeprefix(f"{each.path.parent}/"))
    changed = {}
    for source, manifest in manifests.items():
        kept: list[dict[str, Any]] = []
        gone: list[dict[str, Any]] = []
        for entry in manifest["shards"]:
            why = [
                reason for name in shards.files_of(entry) for reason in reasons.pop(out / source / name, [])
            ]
            (gone if why else kept).append({**entry, "reason": "; ".join(why)} if why else entry)
        if gone and not kept:
            raise ValueError(
                f"all shards of {out / source} are damaged: nothing would be left. Prepare the data again"
            )
        if gone:
            windows, before = sum(entry["windows"] for entry in kept), manifest.get("quarantined", [])
            changed[source] = {
                **manifest,
                "windows": windows,
                "shards": kept,
                "quarantined": [*before, *gone],
            }
    manifests |= changed
    _refuse_others(out, list(reasons), manifests)
    locks = {path: mixture.read_lock(path) for path in sorted(out.glob("*.lock.json"))}
    for source, manifest in changed.items():
        for entry in manifest["quarantined"]:
            stage.forget(out, shuffle.SHUFFLE, Unit(source, shards.shard_number(entry["name"])))
            line = f"quarantined: {out / source / entry['name']}: {entry['reason']}"
            console.print(line, markup=False, soft_wrap=True)
        shards.write_manifest(out / source, manifest)
    pinned = [path for path, lock in locks.items() if _pin(out, path, lock, manifests, console)]
    if pinned:
        console.print(AFTER_A_CHANGE, highlight=False, soft_wrap=True)


def _refuse_others(out: Path, damaged: list[Path], manifests: dict[str, dict[str, Any]]) -> None:
    """ValueError for damage that leaving out shards does not repair; an extra file does no harm."""
    for path in damaged:
        if path.parent.name in manifests and path.name not in (shards.MANIFEST, shards.VALID):
            continue
        if path.name.endswith(".lock.json") and any("quarantined" in each for each in manifests.values()):
            continue  # a quarantine was interrupted after its manifest; a lock that is broken itself is refused later
        fix = f"prepare the data again (python -m data_mixtures.prepare RECIPE --out {out})"
        if path.name == shards.VALID:
            fix = f"remove the last unit of {out / shuffle.SHUFFLE / path.parent.name}, then {fix}: it is written again"
        raise ValueError(
            f"{path} is damaged and is no shard, so it cannot be left out; nothing was changed. To repair it, {fix}"
        )


def _pin(
    out: Path, path: Path, lock: dict[str, Any], manifests: dict[str, dict[str, Any]], console: Console
) -> bool:
    """Rewrite the lock when one of its sources has quarantined shards; returns
    whether its fingerprint changed.
    """
    for entry in lock["sources"]:
        manifest = manifests.get(entry["name"], {})
        if "quarantined" in manifest:
            entry["windows"] = manifest["windows"]
            entry["content_sha256"] = shards.content_sha256(manifest)
    old, new = lock["fingerprint"], mixture.fingerprint(lock)
    if new != old:
        shards.write_json(path, {**lock, "fingerprint": new})
        console.print(f"{path}: fingerprint {old} is now {new}", highlight=False, soft_wrap=True)
    return new != old
