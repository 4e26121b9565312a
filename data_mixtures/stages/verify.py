"""verify: compare every byte of every source with its manifest, and name damage by file and block."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from rich.console import Console
from rich.progress import track

from data_mixtures import document_ids, mixture, shards
from data_mixtures.shards import Json
from data_mixtures.stages import shuffle, stage
from data_mixtures.stages.stage import Unit


@dataclass(frozen=True)
class Damage:
    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def verify(out: Path, sources: tuple[str, ...], console: Console, workers: int) -> list[Damage]:
    """Check all files of these sources and the locks beside them; print and return the damage.

    Raises:
        ValueError: a source has no readable manifest.
    """
    manifests = {source: shards.read_manifest(out / source) for source in sources}
    files = [
        (out / source, manifest, entry)
        for source, manifest in manifests.items()
        for entry in shards.token_files(manifest)
    ]
    damage: list[Damage] = []
    # threads suffice: hashing and searching release the interpreter lock
    with ThreadPoolExecutor(workers) as pool:
        checks = pool.map(_check_file, *zip(*files, strict=True))
        for of_file in track(checks, "verifying", len(files), console=console, transient=True):
            damage += of_file
    for source, manifest in manifests.items():
        damage += _check_listing(out / source, manifest)
    damage += _check_locks(out, manifests)
    for item in damage:
        console.print(f"damaged: {item}", style="red", soft_wrap=True, markup=False)
    count = sum(len(shards.files_of(entry)) for _, _, entry in files)
    size = sum(entry["bytes"] for _, _, entry in files)
    console.print(f"{count} files, {size:,} bytes: {len(damage)} damaged")
    return damage


def _check_file(folder: Path, manifest: Json, entry: Json) -> list[Damage]:
    damage, begins = _check_tokens(folder / entry["name"], entry, manifest["bos_id"])
    if "flags" in entry:
        damage += _check_tokens(
            folder / entry["flags"]["name"], entry["flags"], manifest["bos_id"]
        )[0]
    if "docs" in entry:
        path = folder / entry["docs"]["name"]
        try:
            _check_index(path, manifest, entry, begins)
        except ValueError as error:
            damage.append(Damage(path, str(error)))
        except OSError as error:
            damage.append(Damage(path, f"cannot be unpacked ({error})"))
    return damage


def _check_index(path: Path, manifest: Json, entry: Json, begins: np.ndarray | None) -> None:
    """Check a document index; ValueError or OSError says what is wrong.

    Args:
        begins: where documents begin in undamaged tokens.
    """
    if not path.is_file():
        raise ValueError("missing")
    data = shards.unpack_file(path)
    docs = entry["docs"]
    if (sha256 := hashlib.sha256(data).hexdigest()) != docs["sha256_uncompressed"]:
        raise ValueError(f"unpacked sha256 {sha256}, {docs['sha256_uncompressed']} in the manifest")
    lows, lengths, _ = shards.unpack_documents(data)
    if document_ids.is_held_out(lows, manifest["valid_per_10000"]).any():
        raise ValueError("lists documents that are held out")
    if begins is None:
        return
    # the last token is the next shard's first as well
    begins = begins[begins < entry["windows"] * manifest["seq_len"]]
    if len(begins) != len(lows):
        raise ValueError(f"lists {len(lows)} documents, {len(begins)} begin in {entry['name']}")
    # of packed windows, documents do not lie in a row
    if "flags" not in entry and not np.array_equal(np.diff(begins), lengths[:-1]):
        raise ValueError(
            f"its documents do not begin where {entry['name']} has {manifest['bos_id']}"
        )


def _check_tokens(path: Path, entry: Json, bos_id: int) -> tuple[list[Damage], np.ndarray | None]:
    """Return a file's damage and, without any, the int64 places of `bos_id`."""
    if not path.is_file():
        return [Damage(path, f"missing; {entry['bytes']} bytes in the manifest")], None
    damage: list[Damage] = []
    digest = hashlib.sha256()
    begins = [np.empty(0, np.int64)]
    dtype = shards.token_dtype(entry)
    # one pass: sha256 of the file, the hash of each 16 MiB block, which locates damage, and the
    # places of `bos_id`, which must match the document index
    for number, expected in enumerate(entry["xxh3_blocks"]):
        at = number * shards.BLOCK_BYTES
        block = _read_block(path, at)
        digest.update(block)
        if expected != xxhash.xxh3_64_hexdigest(block):
            reason = f"does not have its hash {expected}" if block else "cannot be read"
            damage.append(Damage(path, f"block {number} {reason}"))
        tokens = np.frombuffer(block, dtype, len(block) // dtype.itemsize)
        begins.append(np.flatnonzero(tokens == bos_id) + at // dtype.itemsize)
    if (size := path.stat().st_size) != entry["bytes"]:
        damage.append(
            Damage(path, f"{size} bytes, {entry['bytes']} in the manifest: truncated or foreign")
        )
    elif digest.hexdigest() != entry["sha256"] and not damage:
        damage.append(
            Damage(path, f"sha256 {digest.hexdigest()}, {entry['sha256']} in the manifest")
        )
    return damage, None if damage else np.concatenate(begins)


def _read_block(path: Path, at: int) -> bytes:
    with suppress(OSError), path.open("rb", buffering=0) as file:
        file.seek(at)
        return file.read(shards.BLOCK_BYTES)
    # a disk error: nothing could be read
    return b""


def _check_listing(folder: Path, manifest: Json) -> list[Damage]:
    entries = [*shards.token_files(manifest), *manifest.get("quarantined", [])]
    expected = {shards.MANIFEST, *(name for entry in entries for name in shards.files_of(entry))}
    others = sorted(path for path in folder.iterdir() if path.name not in expected)
    return [Damage(path, "not in the manifest") for path in others]


def _check_locks(out: Path, manifests: dict[str, Json]) -> list[Damage]:
    damage = []
    path = shards.tokenizer_path(out)
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
                damage.append(
                    Damage(path, f"pins other data than that of {out / name / shards.MANIFEST}")
                )
    return damage


def remedy(recipe_path: Path, out: Path, damage: Iterable[Damage]) -> list[str]:
    # A published file is a hard link to its unit's in `shuffle`, so both go, and the shard is made
    # again from the tokenized units. `prepare` compares manifests, locks and the tokenizer by
    # itself.
    gone: dict[Path, None] = {}
    for path in (item.path for item in damage):
        if path.parent == out or path.name == shards.MANIFEST:
            continue
        number = int(shard[1]) if (shard := re.match(r"shard-(\d+)\.", path.name)) else None
        if path.name in (shards.VALID, shuffle.flags_name(shards.VALID)):
            # its unit follows the shards'
            number = len(shards.read_manifest(path.parent)["shards"])
        if number is not None:
            gone[stage.unit_folder(out, shuffle.SHUFFLE, Unit(path.parent.name, number))] = None
        gone[path] = None
    removal = [shlex.join(["rm", "-rf", *map(str, gone)])] if gone else []
    return [
        *removal,
        f"python -m data_mixtures.prepare {shlex.join([str(recipe_path), '--out', str(out)])}",
    ]
