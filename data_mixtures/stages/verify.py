"""verify: every byte of every source compared with its manifest, damage named by file and block.

One pass over a file gives its sha256, the hash of each 16 MiB block (which locates damage) and the positions
of `bos_id`, which must be where the document index says that documents begin. Locks are checked against
manifests. Threads suffice: hashing and searching release the interpreter lock.

Nothing is changed. `remedy` says which commands make the damaged files again: from the tokenized units, with
the same bytes, so manifest, locks and fingerprints stay what they were.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from rich.console import Console
from rich.progress import track

from data_mixtures import mixture, shards
from data_mixtures.shards import Json
from data_mixtures.stages import shuffle, stage
from data_mixtures.stages.stage import Unit


@dataclass(frozen=True)
class Damage:
    """Something that is not what it should be."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class Span(NamedTuple):
    """Of the documents that a shard lists: where the first begins and the one after the last would, in tokens."""

    shard: int
    begin: int
    end: int


def verify(out: Path, sources: tuple[str, ...], console: Console, workers: int) -> list[Damage]:
    """Check all files of these sources and the locks beside them, and print what is wrong.

    ValueError when a source has no readable manifest.
    """
    manifests = {source: shards.read_manifest(out / source) for source in sources}
    files = [
        (out / source, manifest, entry)
        for source, manifest in manifests.items()
        for entry in shards.token_files(manifest)
    ]
    damage: list[Damage] = []
    spans: dict[str, list[Span]] = {source: [] for source in sources}
    with ThreadPoolExecutor(workers) as pool:
        checks = pool.map(_check_file, *zip(*files, strict=True))
        progress = track(checks, "verifying", len(files), console=console, transient=True)
        for (folder, *_), (of_file, span) in zip(files, progress, strict=True):
            damage += of_file
            spans[folder.name] += span
    for source, manifest in manifests.items():
        damage += _check_source(out / source, manifest, spans[source])
    damage += _check_locks(out, manifests)
    for each in damage:
        console.print(f"damaged: {each}", style="red", soft_wrap=True, markup=False)
    count = sum(len(shards.files_of(entry)) for _, _, entry in files)
    size = sum(entry["bytes"] for _, _, entry in files)
    console.print(f"{count} files, {size:,} bytes: {len(damage)} damaged")
    return damage


def _check_file(folder: Path, manifest: Json, entry: Json) -> tuple[list[Damage], list[Span]]:
    """The tokens of a file, its document index, and both against each other; its span where that is known."""
    damage, begins = _check_tokens(folder / entry["name"], entry, manifest["bos_id"])
    if "flags" in entry:
        damage += _check_tokens(folder / entry["flags"]["name"], entry["flags"], manifest["bos_id"])[0]
    if "docs" not in entry:
        return damage, []
    path = folder / entry["docs"]["name"]
    try:
        return damage, _check_index(path, manifest, entry, begins)
    except ValueError as error:
        return [*damage, Damage(path, str(error))], []
    except OSError as error:
        return [*damage, Damage(path, f"cannot be unpacked ({error})")], []


def _check_index(path: Path, manifest: Json, entry: Json, begins: np.ndarray | None) -> list[Span]:
    """A document index. begins: where documents begin in undamaged tokens. ValueError or OSError says what is wrong."""
    if not path.is_file():
        raise ValueError("missing")
    data, docs = shards.unpacked(path), entry["docs"]
    if (sha256 := hashlib.sha256(data).hexdigest()) != docs["sha256_uncompressed"]:
        raise ValueError(f"unpacked sha256 {sha256}, {docs['sha256_uncompressed']} in the manifest")
    ids, lengths, _ = shards.unpack_documents(data)
    if len(ids) != docs["documents"]:
        raise ValueError(f"{len(ids)} documents, {docs['documents']} in the manifest")
    if (ids < np.uint64(shards.held_out_below(manifest["valid_per_10000"]))).any():
        raise ValueError("lists documents that are held out")
    if begins is None:
        return []
    # the last token is the next shard's first as well
    begins = begins[begins < entry["windows"] * manifest["seq_len"]]
    if len(begins) != len(ids):
        raise ValueError(f"lists {len(ids)} documents, {len(begins)} begin in {entry['name']}")
    if "flags" in entry or not len(ids):  # packed: not in a row
        return []
    ends = begins[0] + np.cumsum(lengths, dtype=np.int64)
    if not np.array_equal(begins, ends - lengths):
        raise ValueError(f"its documents do not begin where {entry['name']} has {manifest['bos_id']}")
    number = shards.shard_number(entry["name"])
    at = number * manifest["windows_per_shard"] * manifest["seq_len"]
    return [Span(number, at + int(begins[0]), at + int(ends[-1]))]


def _check_tokens(path: Path, entry: Json, bos_id: int) -> tuple[list[Damage], np.ndarray | None]:
    """Bytes of a file against its entry; where `bos_id` stands, int64, if there is no damage."""
    if not path.is_file():
        return [Damage(path, f"missing; {entry['bytes']} bytes in the manifest")], None
    damage: list[Damage] = []
    begins = [np.empty(0, np.int64)]
    whole, at, dtype = hashlib.sha256(), 0, shards.token_dtype(entry)
    size = path.stat().st_size
    for number, (block, expected) in enumerate(
        zip_longest(shards.read_blocks(path, size), entry["xxh3_blocks"])
    ):
        if block is None:  # the file is too short, which is said below
            break
        whole.update(block)
        if expected != xxhash.xxh3_64_hexdigest(block):
            reason = "lies behind the end" if expected is None else f"does not have its hash {expected}"
            damage.append(Damage(path, f"block {number} {reason if block else 'cannot be read'}"))
        tokens = np.frombuffer(block, dtype, len(block) // dtype.itemsize)
        begins.append(np.flatnonzero(tokens == bos_id) + at)
        at += len(tokens)
    if size != entry["bytes"]:
        damage.append(Damage(path, f"{size} bytes, {entry['bytes']} in the manifest: truncated or foreign"))
    elif whole.hexdigest() != entry["sha256"] and not damage:
        damage.append(Damage(path, f"sha256 {whole.hexdigest()}, {entry['sha256']} in the manifest"))
    return damage, None if damage else np.concatenate(begins)


def _check_source(folder: Path, manifest: Json, spans: list[Span]) -> list[Damage]:
    """Checks across files: documents that continue in the next shard, counts, files that do not belong here."""
    damage: list[Damage] = []
    path = folder / shards.MANIFEST
    for left, right in pairwise(spans):
        if right.shard == left.shard + 1 and right.begin != left.end:
            reason = f"shard {left.shard} lists documents up to token {left.end}, shard {right.shard} from"
            damage.append(Damage(path, f"{reason} {right.begin}"))
    windows = sum(entry["windows"] for entry in manifest["shards"])
    if windows != manifest["windows"]:
        damage.append(Damage(path, f"{manifest['windows']} windows, its shards have {windows}"))
    if manifest["read"] != manifest["kept"] + sum(manifest["dropped"].values()):
        damage.append(Damage(path, f"{manifest['read']} documents read are not those kept and dropped"))
    listed = [*shards.token_files(manifest), *manifest.get("quarantined", [])]
    known = {shards.MANIFEST, *(name for entry in listed for name in shards.files_of(entry))}
    others = sorted(each for each in folder.iterdir() if each.name not in known)
    return damage + [Damage(each, "not in the manifest") for each in others]


def _check_locks(out: Path, manifests: dict[str, Json]) -> list[Damage]:
    damage, path = [], shards.tokenizer_path(out)
    for source, manifest in manifests.items():
        expected = manifest["tokenizer_sha256"]
        if path.is_file() and stage.sha256_of(path) != expected:
            damage.append(Damage(path, f"is not the tokenizer of {source} ({expected})"))
    for path in sorted(out.glob("*.lock.json")):
        try:
            lock = mixture.read_lock(path)
        except ValueError as error:
            damage.append(Damage(path, str(error)))
            continue
        for entry in lock["sources"]:
            name = entry["name"]
            if name in manifests and manifests[name]["content_sha256"] != entry["content_sha256"]:
                damage.append(Damage(path, f"pins other data than that of {out / name / shards.MANIFEST}"))
    return damage


def remedy(recipe_path: Path, out: Path, damage: Iterable[Damage]) -> list[str]:
    """The shell commands that restore damaged files: what to delete, and the preparation that writes it again.

    A published file is a hard link to its unit's in `shuffle`, so both go, and the shard is made again from the
    tokenized units. `prepare` compares manifests, locks and the tokenizer by itself.
    """
    gone: dict[Path, None] = {}
    for path in (each.path for each in damage):
        if path.parent == out or path.name == shards.MANIFEST:
            continue
        number = int(shard[1]) if (shard := re.match(r"shard-(\d+)\.", path.name)) else None
        if path.name in (shards.VALID, shuffle.flags_name(shards.VALID)):  # its unit follows the shards'
            number = len(shards.read_manifest(path.parent)["shards"])
        if number is not None:
            gone[stage.unit_folder(out, shuffle.SHUFFLE, Unit(path.parent.name, number))] = None
        gone[path] = None
    removal = [shlex.join(["rm", "-rf", *map(str, gone)])] if gone else []
    return [*removal, f"python -m data_mixtures.prepare {shlex.join([str(recipe_path), '--out', str(out)])}"]
