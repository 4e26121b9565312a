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
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from rich.console import Console
from rich.progress import track

from data_mixtures import mixture, shards
from data_mixtures.shards import Json
from data_mixtures.stages import shuffle, stage
from data_mixtures.stages.stage import Unit
from records.workers import usable_cpus

# of a whole shard: its number, where its first document begins, and where the one after its last
# would, in tokens
Span = tuple[int, int, int]


@dataclass(frozen=True)
class Damage:
    """Something that is not what it should be. block: of 16 MiB, by number; None for the whole file."""

    path: Path
    reason: str
    block: int | None = None

    def __str__(self) -> str:
        block = "" if self.block is None else f"block {self.block} "
        return f"{self.path}: {block}{self.reason}"


def verify(out: Path, sources: tuple[str, ...], console: Console, workers: int | None = None) -> list[Damage]:
    """Check all files of these sources and the locks beside them, and print what is wrong.

    ValueError when a source has no readable manifest.
    """
    manifests = {source: shards.read_manifest(out / source) for source in sources}
    of_sources = ((out / source, manifest) for source, manifest in manifests.items())
    files = [(*each, entry) for each in of_sources for entry in shards.token_files(each[1])]
    found: list[Damage] = []
    spans: dict[str, list[Span]] = {source: [] for source in sources}
    with ThreadPoolExecutor(workers or usable_cpus()) as pool:
        checks = pool.map(_check_file, *zip(*files, strict=True))
        shown = track(checks, "verifying", len(files), console=console, transient=True)
        for (folder, *_), (damage, span) in zip(files, shown, strict=True):
            found += damage
            spans[folder.name] += span
    for source, manifest in manifests.items():
        found += _check_source(out / source, manifest, spans[source])
    found += _check_locks(out, manifests)
    for each in found:
        console.print(f"damaged: {each}", style="red", soft_wrap=True, markup=False)
    count = sum(len(shards.files_of(entry)) for _, _, entry in files)
    size = sum(entry["bytes"] for _, _, entry in files)
    console.print(f"{count} files, {size:,} bytes: {len(found)} damaged")
    return found


def _check_file(folder: Path, manifest: Json, entry: Json) -> tuple[list[Damage], list[Span]]:
    """The tokens of a file, its document index, and both against each other; its span where that is known."""
    damage, begins = _check_tokens(folder / entry["name"], entry, manifest["bos_id"])
    if "flags" in entry:
        damage += _check_tokens(folder / entry["flags"]["name"], entry["flags"], manifest["bos_id"])[0]
    if "docs" not in entry:
        return damage, []
    path = folder / entry["docs"]["name"]
    try:
        ids, lengths, _ = _documents(path, entry["docs"])
    except ValueError as error:
        return [*damage, Damage(path, str(error))], []
    except OSError as error:
        return [*damage, Damage(path, f"cannot be unpacked ({error})")], []
    if begins is None:
        return damage, []
    wrong: list[Damage] = []
    if (ids < np.uint64(shards.held_out_below(manifest["valid_per_10000"]))).any():
        wrong.append(Damage(path, "lists documents that are held out"))
    # the last token is the next shard's first as well
    begins = begins[begins < entry["windows"] * manifest["seq_len"]]
    first = int(begins[0]) if len(begins) else 0
    ends = first + np.cumsum(lengths, dtype=np.int64)
    if "flags" in entry:
        if len(begins) != len(ids):
            wrong.append(Damage(path, f"lists {len(ids)} documents, {len(begins)} begin in {entry['name']}"))
        return damage + wrong, []
    if not np.array_equal(begins, ends - lengths):
        wrong.append(
            Damage(path, f"its documents do not begin where {entry['name']} has {manifest['bos_id']}")
        )
    number = shards.shard_number(entry["name"])
    at = number * manifest["windows_per_shard"] * manifest["seq_len"]
    return damage + wrong, [(number, at + first, at + int(ends[-1]))] if len(ends) and not wrong else []


def _check_tokens(path: Path, entry: Json, bos_id: int) -> tuple[list[Damage], np.ndarray | None]:
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


def _documents(path: Path, entry: Json) -> tuple[np.ndarray, np.ndarray, Any]:
    """A document index. ValueError or OSError says what is wrong with it."""
    if not path.is_file():
        raise ValueError("missing")
    data = shards.unpacked(path)
    found = hashlib.sha256(data).hexdigest()
    if found != (expected := entry["sha256_uncompressed"]):
        raise ValueError(f"unpacked sha256 {found}, {expected} in the manifest")
    documents = shards.unpack_documents(data)
    if (count := len(documents[0])) != entry["documents"]:
        raise ValueError(f"{count} documents, {entry['documents']} in the manifest")
    return documents


def _check_source(folder: Path, manifest: Json, spans: list[Span]) -> list[Damage]:
    """Checks across files: documents that continue in the next shard, counts, files that do not belong here."""
    damage: list[Damage] = []
    path = folder / shards.MANIFEST
    for (left, _, end), (right, begin, _) in pairwise(spans):
        if right == left + 1 and begin != end:
            said = f"shard {left} lists documents up to token {end}, shard {right} from {begin}"
            damage.append(Damage(path, said))
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
        number = int(found[1]) if (found := re.match(r"shard-(\d+)\.", path.name)) else None
        if path.name in (shards.VALID, shuffle.flags_name(shards.VALID)):  # its unit follows the shards'
            number = len(shards.read_manifest(path.parent)["shards"])
        if number is not None:
            gone[stage.unit_folder(out, shuffle.SHUFFLE, Unit(path.parent.name, number))] = None
        gone[path] = None
    removal = [shlex.join(["rm", "-rf", *map(str, gone)])] if gone else []
    return [*removal, f"python -m data_mixtures.prepare {shlex.join([str(recipe_path), '--out', str(out)])}"]
