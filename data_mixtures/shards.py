"""A source on disk: token shards, document indexes, held-out windows, and their manifest.

`shard-NNNNN.bin` is a little-endian stream of windows * S + 1 tokens, uint16 for vocabularies of at
most 65,536 ids, else uint32. Window i is tokens[i * S : i * S + S + 1]: windows overlap by one token,
as do neighbouring shards, so every token is a target exactly once. `valid.bin` has the same form.

`shard-NNNNN.docs.zst` lists the documents that begin in the shard: uint64 count, uint64 ids, uint32
lengths in tokens, uint32 lengths of the origins in bytes, and the origins as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow
import xxhash

from records.files import write_json

# an object of a JSON file: a manifest, lock, plan or receipt, or a part of one
Json = dict[str, Any]
FORMAT = 2
BLOCK_BYTES = 16 << 20  # the unit of integrity checks while reading
MANIFEST = "source.json"
PREPARE = "prepare the data again (python -m data_mixtures.prepare), which does again only what is not there"
VALID = "valid.bin"
CHAT_TEMPLATE = "chat_template.jinja"  # of conversations
TOKENIZER_MODEL, TOKENIZER_JSON = "tokenizer.model", "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
# The same in the lock and in every source. bos_id begins each document, eos_id ends it; if they are
# equal, it only begins one.
TOKENIZER_FACTS = ("tokenizer_sha256", "vocab_size", "token_bytes", "bos_id", "eos_id")
# what decides the windows of a source and how they are read; the block hashes are what training
# compares
_CONTENT = ("windows", "seed", "seq_len", *TOKENIZER_FACTS)
_CONTENT_OF_FILE = ("bytes", "windows", "sha256", "xxh3_blocks")


def token_dtype(entry: Json) -> np.dtype:
    """Return the dtype of an entry's tokens; ValueError unless it is <u2 or <u4."""
    # an empty file has no width
    width, rest = divmod(entry["bytes"] or 2, entry["tokens"] or 1)
    if rest or width not in (2, 4):
        raise ValueError(
            f"{entry['tokens']} tokens in {entry['bytes']} bytes: not 2 or 4 each; prepare again"
        )
    return np.dtype(f"<u{width}")


def windows_in(tokens: int, seq_len: int) -> int:
    return max(tokens - 1, 0) // seq_len


def write_windows(path: Path, tokens: np.ndarray, seq_len: int) -> Json:
    """Write the whole windows that the tokens fill; return the file's manifest entry."""
    return write_pieces(path, [tokens[: windows_in(len(tokens), seq_len) * seq_len + 1]], seq_len)


def write_pieces(path: Path, pieces: Iterable[np.ndarray], seq_len: int) -> Json:
    """Write windows from pieces of tokens, all uint16 or all uint32; return the file's manifest entry."""
    file_digest = hashlib.sha256()
    block_digest = xxhash.xxh3_64()
    blocks = []
    room = BLOCK_BYTES
    size = 0
    tokens = 0
    with path.open("wb") as file:
        for piece in pieces:
            assert piece.dtype.kind == "u", f"tokens are {piece.dtype}, not unsigned integers"
            tokens += len(piece)
            data = np.ascontiguousarray(piece, piece.dtype.newbyteorder("<")).view(np.uint8).data
            size += file.write(data)
            file_digest.update(data)
            while data:
                block_digest.update(data[:room])
                data, room = data[room:], max(room - len(data), 0)
                if not room:
                    blocks.append(block_digest.hexdigest())
                    block_digest = xxhash.xxh3_64()
                    room = BLOCK_BYTES
    if room < BLOCK_BYTES:
        blocks.append(block_digest.hexdigest())
    sizes = {"bytes": size, "windows": windows_in(tokens, seq_len), "tokens": tokens}
    token_dtype(sizes)
    return {"name": path.name, **sizes, "sha256": file_digest.hexdigest(), "xxh3_blocks": blocks}


def write_documents(
    path: Path, columns: Sequence[np.ndarray], origins: Iterable[np.ndarray]
) -> Json:
    """Write the document index and return its entry.

    Args:
        columns: ids, lengths in tokens, lengths of origins in bytes.
        origins: their bytes one after another, in pieces.
    """
    digest = hashlib.sha256()
    ids, lengths, sizes = columns
    head = (
        np.array([len(ids)], "<u8"),
        ids.astype("<u8"),
        lengths.astype("<u4"),
        sizes.astype("<u4"),
    )
    with pyarrow.CompressedOutputStream(str(path), "zstd") as stream:
        for data in chain(head, origins):
            # hash the uncompressed bytes, which do not depend on the zstd version
            digest.update(data.data)
            stream.write(data.data)
    return {"name": path.name, "documents": len(ids), "sha256_uncompressed": digest.hexdigest()}


def read_documents(path: Path) -> tuple[np.ndarray, np.ndarray, pyarrow.LargeStringArray]:
    """Return (ids uint64, lengths uint32, origins) of the documents that begin in a shard."""
    return unpack_documents(unpack_file(path))


def unpack_file(path: Path) -> bytes:
    with pyarrow.CompressedInputStream(str(path), "zstd") as stream:
        return stream.read()


def unpack_documents(data: bytes) -> tuple[np.ndarray, np.ndarray, pyarrow.LargeStringArray]:
    count = int.from_bytes(data[:8], "little")
    ids = np.frombuffer(data, "<u8", count, 8)
    at = 8 + 8 * count
    lengths, sizes = np.frombuffer(data, "<u4", 2 * count, at).reshape(2, count)
    offsets = at + 8 * count + np.append(0, np.cumsum(sizes, dtype=np.int64))
    buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(data)]
    return ids, lengths, pyarrow.Array.from_buffers(pyarrow.large_string(), count, buffers)


def token_files(manifest: Json) -> list[Json]:
    """Return the entries of all token files: shards in order, then held-out windows."""
    return [*manifest["shards"], manifest["valid"]]


def shard_number(name: str) -> int:
    return int(re.findall(r"\d+", name)[0])


def _window_files(manifest: Json) -> list[Json]:
    files = token_files(manifest)
    return files + [entry["flags"] for entry in files if "flags" in entry]


def content_sha256(manifest: Json) -> str:
    """Return the identity of a source's data: a hash of what decides its windows."""
    # not of code version, plan, counts and document indexes, which say where the data came from and
    # may differ
    of_files = [[entry[name] for name in _CONTENT_OF_FILE] for entry in _window_files(manifest)]
    content = json.dumps([[manifest.get(name) for name in _CONTENT], of_files])
    return hashlib.sha256(content.encode()).hexdigest()


def write_manifest(folder: Path, manifest: Json) -> None:
    """Write source.json, adding its format and content_sha256."""
    # a pure function of the texts, the tokenizer, the recipe's numbers and the code: no time, no
    # path, no host
    write_json(
        folder / MANIFEST,
        {"format": FORMAT, **manifest, "content_sha256": content_sha256(manifest)},
    )


def tokenizer_path(folder: Path) -> Path:
    """Return the path of tokenizer.json, or of the sentencepiece model without one."""
    path = folder / TOKENIZER_JSON
    return path if path.is_file() else folder / TOKENIZER_MODEL


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a folder's tokenizer and, for conversations, their template."""
    path = tokenizer_path(folder)
    files = (path, folder / TOKENIZER_CONFIG) if path.name == TOKENIZER_JSON else (path,)
    files = (*files, folder / CHAT_TEMPLATE)
    return [file for file in files if file.is_file()]


class MissingFile(ValueError, FileNotFoundError):
    """A required file is not there (yet): a node's mount may be slow."""


def read_json(path: Path, fix: str) -> Json:
    """Read a JSON object; ValueError names the file and the fix."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; {fix}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); {fix}") from error


def read_manifest(folder: Path) -> Json:
    """Read source.json; ValueError when it is missing, broken, edited, or of another format."""
    manifest = read_json(path := folder / MANIFEST, PREPARE)
    check_format(path, manifest)
    if (recorded := manifest.get("content_sha256")) != (actual := content_sha256(manifest)):
        edited = f"{path} says content_sha256 {recorded}, its data have {actual}: damaged or edited"
        raise ValueError(f"checksum mismatch: {edited}; {PREPARE}")
    return manifest


def read_manifests(data: Path) -> dict[str, Json]:
    # a killed publication may have left hidden folders
    folders = sorted(path.parent for path in data.glob(f"[!.]*/{MANIFEST}"))
    if not folders:
        raise ValueError(
            f"{data} holds no <source>/{MANIFEST}; create it: python -m data_mixtures.prepare"
        )
    return {folder.name: read_manifest(folder) for folder in folders}


def check_format(path: Path, content: Json) -> None:
    if (file_format := content.get("format")) != FORMAT:
        raise ValueError(f"{path} has format {file_format!r}, this code reads {FORMAT}; {PREPARE}")


def files_of(entry: Json) -> tuple[str, ...]:
    """Return the names of all files that a manifest entry describes."""
    # older folders also hold parity files, which nothing reads
    return (
        entry["name"],
        *(entry[part]["name"] for part in ("parity", "docs", "flags") if part in entry),
    )


def check_sizes(folder: Path, manifest: Json) -> None:
    """Raise ValueError for the first file of the manifest that is missing or of another size."""
    for entry in _window_files(manifest):
        path = os.path.join(folder, entry["name"])
        expected = entry["bytes"]
        # one `stat` a file: there may be thousands, on a file system far away
        try:
            size = os.stat(path).st_size
        except FileNotFoundError:
            raise MissingFile(
                f"{path} is missing, {expected} bytes in its manifest. {PREPARE}"
            ) from None
        if size != expected:
            raise ValueError(
                f"{path} has {size} bytes, its manifest says {expected}: truncated. {PREPARE}"
            )


def save_array(path: Path, array: np.ndarray) -> None:
    # on a full disk, numpy's own error only says "145 requested and 122 written"
    with path.open("wb") as file:
        write_array_header(file, array.dtype, len(array))
        file.write(np.ascontiguousarray(array).view(np.uint8).data)


def write_array_header(file: BinaryIO, dtype: np.dtype, rows: int) -> None:
    # one-dimensional
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(
        file, {"descr": descr, "fortran_order": False, "shape": (rows,)}
    )


def publish(partial: Path, final: Path) -> None:
    """Move a finished folder into place; delete an older one only afterwards."""
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    shutil.rmtree(old, ignore_errors=True)
