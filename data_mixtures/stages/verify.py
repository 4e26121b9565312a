"""Verification: every byte of every source compared with its manifest, damage named by file and block.

One pass over a file gives its sha256, the hash of each 16 MiB block (which says where it is damaged) and the places of
<s>, which must be where the document index says that documents begin. Locks are checked against manifests. Threads are
enough: hashing and searching release the interpreter.
What to do about damage: `quarantine`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import xxhash
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from data_mixtures import mixture, shards, tokenizer
from data_mixtures.stages.tokenize_units import TOKENIZER
from records.files import file_sha256


@dataclass(frozen=True)
class Damage:
    """Something that is not what it should be. block: number of the 16 MiB block, None for the file as a whole."""

    path: Path
    reason: str
    block: int | None = None

    @property
    def what(self) -> str:
        return self.reason if self.block is None else f"block {self.block} {self.reason}"

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


@dataclass
class Report:
    """What was looked at, and what is wrong with it."""

    files: int = 0
    bytes: int = 0
    damage: list[Damage] = field(default_factory=list)


def verify(out: Path, sources: tuple[str, ...], console: Console, workers: int | None = None) -> Report:
    """Check all files of these sources and the locks beside them; nothing is changed.

    ValueError when a source has no readable manifest.
    """
    manifests = {source: shards.read_manifest(out / source) for source in sources}
    total = sum(entry["bytes"] for manifest in manifests.values() for entry in _entries(manifest))
    report = Report()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress, _threads(workers) as pool:
        task = progress.add_task("verifying", total=total)
        for source, manifest in manifests.items():
            folder, entries = out / source, _entries(manifest)
            checks = pool.map(lambda entry, m=manifest, at=folder: _check_file(at, m, entry), entries)
            spans = []
            for entry, (damage, span) in zip(entries, checks, strict=True):
                report.damage += damage
                report.files += 1 + ("docs" in entry)
                report.bytes += entry["bytes"]
                spans.append(span)
                progress.advance(task, entry["bytes"])
            report.damage += _check_source(folder, manifest, spans)
    report.damage += _check_locks(out, manifests)
    for each in report.damage:
        console.print(f"damaged: {each}", style="red", highlight=False, soft_wrap=True, markup=False)
    console.print(f"{report.files} files, {report.bytes:,} bytes: {len(report.damage)} damaged", highlight=False)
    return report


def _threads(workers: int | None) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers or os.cpu_count() or 1)


def _entries(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return [*manifest["shards"], manifest["valid"]]


# of a whole shard: its number, where its first document begins, and where the one after its last would, in tokens
Span = tuple[int, int, int]


def _check_file(folder: Path, manifest: dict[str, Any], entry: dict[str, Any]) -> tuple[list[Damage], Span | None]:
    """The tokens of a file, its document index, and both against each other."""
    damage, begins = _check_tokens(folder / entry["name"], entry)
    if "docs" not in entry:
        return damage, None
    path = folder / entry["docs"]["name"]
    wrong, documents = _check_documents(path, entry["docs"])
    if begins is None or documents is None:
        return damage + wrong, None
    ids, lengths = documents
    if (ids < np.uint64(manifest["valid_per_10000"] * 2**64 // 10_000)).any():
        wrong.append(Damage(path, "lists documents that are held out"))
    begins = begins[begins < entry["windows"] * manifest["seq_len"]]  # the last token is the next shard's first as well
    first = int(begins[0]) if len(begins) else 0
    ends = first + np.cumsum(lengths, dtype=np.int64)
    if not np.array_equal(begins, ends - lengths):
        wrong.append(Damage(path, f"its documents do not begin where <s> stands in {entry['name']}"))
    number = int(re.findall(r"\d+", entry["name"])[0])
    at = number * manifest["windows_per_shard"] * manifest["seq_len"]
    span = (number, at + first, at + int(ends[-1])) if len(ends) and not wrong else None
    return damage + wrong, span


def _check_tokens(path: Path, entry: dict[str, Any]) -> tuple[list[Damage], np.ndarray | None]:
    if not path.is_file():
        return [Damage(path, f"missing; {entry['bytes']} bytes in the manifest")], None
    damage: list[Damage] = []
    whole, begins, at = hashlib.sha256(), [], 0
    for number, block in enumerate(_blocks(path)):
        whole.update(block)
        expected = entry["xxh3_blocks"][number] if number < len(entry["xxh3_blocks"]) else None
        if expected != xxhash.xxh3_64_hexdigest(block):
            what = "lies behind the end" if expected is None else f"does not have its hash {expected}"
            damage.append(Damage(path, what, number))
        tokens = np.frombuffer(block, "<u2", len(block) // shards.TOKEN_BYTES)
        begins.append(np.flatnonzero(tokens == tokenizer.BOS) + at)
        at += len(tokens)
    size = path.stat().st_size
    if size != entry["bytes"]:
        damage.append(Damage(path, f"{size} bytes, {entry['bytes']} in the manifest: truncated or foreign"))
    elif whole.hexdigest() != entry["sha256"] and not damage:
        damage.append(Damage(path, f"sha256 {whole.hexdigest()}, {entry['sha256']} in the manifest"))
    return damage, None if damage else np.concatenate(begins)


def _blocks(path: Path) -> Iterator[memoryview]:
    buffer = bytearray(shards.BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while True:
            size = 0
            while size < len(buffer) and (count := file.readinto(memoryview(buffer)[size:])):
                size += count
            if not size:
                return
            yield memoryview(buffer)[:size]


def _check_documents(path: Path, entry: dict[str, Any]) -> tuple[list[Damage], tuple[np.ndarray, np.ndarray] | None]:
    if not path.is_file():
        return [Damage(path, "missing")], None
    try:
        with pyarrow.CompressedInputStream(str(path), "zstd") as stream:
            data = stream.read()
    except OSError as error:
        return [Damage(path, f"cannot be unpacked ({error})")], None
    found = hashlib.sha256(data).hexdigest()
    if found != entry["sha256_uncompressed"]:
        return [Damage(path, f"unpacked sha256 {found}, {entry['sha256_uncompressed']} in the manifest")], None
    ids, lengths = shards.unpack_documents(data)
    if len(ids) != entry["documents"]:
        return [Damage(path, f"{len(ids)} documents, {entry['documents']} in the manifest")], None
    return [], (ids, lengths)


def _check_source(folder: Path, manifest: dict[str, Any], spans: list[Span | None]) -> list[Damage]:
    """What needs more than one file: documents that go on in the next shard, counts, files that do not belong here."""
    damage: list[Damage] = []
    path = folder / shards.MANIFEST
    for left, right in pairwise(span for span in spans if span):
        if right[0] == left[0] + 1 and right[1] != left[2]:
            damage.append(
                Damage(path, f"shard {left[0]} lists documents up to token {left[2]}, shard {right[0]} from {right[1]}")
            )
    windows = sum(entry["windows"] for entry in manifest["shards"])
    if windows != manifest["windows"]:
        damage.append(Damage(path, f"{manifest['windows']} windows, its shards have {windows}"))
    if manifest["read"] != manifest["kept"] + sum(manifest["dropped"].values()):
        damage.append(Damage(path, f"{manifest['read']} documents read are not those kept and dropped"))
    known = {shards.MANIFEST, *_names(_entries(manifest)), *_names(manifest.get("quarantined", []))}
    return damage + [Damage(each, "not in the manifest") for each in sorted(folder.iterdir()) if each.name not in known]


def _names(entries: list[dict[str, Any]]) -> list[str]:
    return [name for entry in entries for name in shards.files_of(entry)]


def _check_locks(out: Path, manifests: dict[str, dict[str, Any]]) -> list[Damage]:
    damage = []
    for source, manifest in manifests.items():
        path = out / TOKENIZER
        if path.is_file() and file_sha256(path) != manifest["tokenizer_sha256"]:
            damage.append(Damage(path, f"is not the tokenizer of {source} ({manifest['tokenizer_sha256']})"))
    for path in sorted(out.glob("*.lock.json")):
        try:
            lock = mixture.read_lock(path)
        except ValueError as error:
            damage.append(Damage(path, str(error)))
            continue
        for entry in lock["sources"]:
            manifest_path = out / entry["name"] / shards.MANIFEST
            if entry["name"] in manifests and shards.manifest_sha256(manifest_path.parent) != entry["manifest_sha256"]:
                damage.append(Damage(path, f"pins another manifest than {manifest_path}"))
    return damage
