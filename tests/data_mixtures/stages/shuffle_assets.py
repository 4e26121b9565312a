"""Made-up units as the earlier stages write them, and an in-memory reference of the shards."""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import xxhash
from rich.console import Console

from data_mixtures import shards, tokenizer
from data_mixtures.readers.columns import encode_origin
from data_mixtures.recipe import LocalSource, Recipe, TokenizerFile, TokenizerTraining
from data_mixtures.stages import blocks, manifest, shuffle, sorted_runs, stage
from data_mixtures.stages.stage import Unit
from data_mixtures.stages.tokenize import SLICED, by_key, describe, totals
from records.files import write_json
from tests.data_mixtures.stages.filtered import make_unit_folder, write_receipt

SEED = 7
TOKEN = np.dtype("<u2")


def plan_of(
    sources: Sequence[str] = ("notes",), seq_len=8, windows_per_shard=5, valid_per_10000=1500
) -> Recipe:
    weights = {name: 1 + i for i, name in enumerate(sources)}
    local = tuple(LocalSource(name, "web", ()) for name in sources)
    return Recipe(
        seed=SEED,
        seq_len=seq_len,
        windows_per_shard=windows_per_shard,
        valid_per_10000=valid_per_10000,
        max_document_chars=1000,
        epoch_cap=3,
        tokenizer=TokenizerFile("unused"),
        sources=local,
        phases={"phase1": weights},
    )


def texts_of(count: int, seed: int = 0, repeats: int = 4) -> list[str]:
    draw = random.Random(seed)
    texts: list[str] = []
    for i in range(count):
        repeats_one = texts and draw.randrange(repeats) == 0
        texts.append(
            draw.choice(texts) if repeats_one else f"{i} " + "abc"[i % 3] * draw.randrange(60)
        )
    return texts


SOURCES = ("notes", "sums")
TWO_SOURCES, TWO_TEXTS = (
    plan_of(SOURCES, windows_per_shard=20),
    {"notes": texts_of(130), "sums": texts_of(90, seed=1)},
)


def tokens_of(text: str) -> list[int]:
    """Return BOS, a token for each byte, EOS."""
    return [1, *(3 + byte for byte in text.encode()), 2]


def text_of(tokens: Sequence[int]) -> str:
    return bytes(token - 3 for token in tokens if token > 2).decode()


def origin_of(text: str) -> str:
    """Return "" for some documents, as of a source without provenance."""
    return encode_origin(f"\u00fc/{text[:5]}", len(text), {}) if len(text) % 5 else ""


def write_tokens(folder: Path, texts: Sequence[str]) -> dict[str, Any]:
    """Write documents in the order of their keys, one token per byte; return their counts."""
    ids = [xxhash.xxh3_128_digest(text.encode()) for text in texts]
    lengths = np.array([len(tokens_of(text)) for text in texts], "<u4")
    parts = {
        "tokens.bin": [np.array(tokens_of(text), TOKEN).tobytes() for text in texts],
        "origins.bin": [origin_of(text).encode() for text in texts],
    }
    rows = describe(ids, SEED, lengths, [text.encode() for text in texts], parts["origins.bin"])
    order = by_key(rows)
    rows = rows[order]
    for name, start, length in (
        ("tokens.bin", "start", "length"),
        ("origins.bin", "origin", "origin_bytes"),
    ):
        rows[start] = np.cumsum(rows[length]) - rows[length]
        (folder / name).write_bytes(b"".join(parts[name][i] for i in order))
    np.save(folder / "documents.npy", rows)
    for name in SLICED:
        blocks.seal(folder / name)
    return {**totals(rows), "dropped": {}}


def split(texts: Sequence[str], units: int) -> tuple[tuple[str, ...], ...]:
    """Split texts into parts of unequal size."""
    # squares: the first parts are small, or empty
    cuts = [len(texts) * i * i // units**2 for i in range(units + 1)]
    return tuple(tuple(texts[a:b]) for a, b in pairwise(cuts))


def run(work: stage.Stage) -> None:
    for unit in work.units():
        stage.do(work, unit)


def write_plan(out: Path, source: str, units: int) -> None:
    path = out / "plan.json"
    sources = read_json(path)["sources"] if path.exists() else {}
    numbers = [{"number": number} for number in range(units)]
    sources[source] = {"plan_hash": f"plan of {source}", "units": numbers}
    out.mkdir(parents=True, exist_ok=True)
    write_json(path, {"format": 1, "sources": sources})


def write_tokenized(out: Path, source: str, texts: Sequence[Sequence[str]]) -> None:
    write_plan(out, source, len(texts))
    for number, part in enumerate(texts):
        folder = make_unit_folder(out, "tokenize", Unit(source, number))
        write_receipt(folder, write_tokens(folder, part))


def run_shuffle(out: Path, plan: Recipe, texts: dict[str, Sequence[str]], units: int = 2) -> None:
    for source, passages in texts.items():
        write_tokenized(out, source, split(passages, units))
    run(sorted_runs.Runs(plan, out, tuple(texts)))
    run(shuffle.OrderDocuments(plan, out, tuple(texts)))
    run(shuffle.WriteShards(plan, out, tuple(texts)))


def select(texts: Iterable[str], plan: Recipe) -> tuple[dict[int, str], list[int], list[int]]:
    """Return texts by hash, and the ordered hashes of training and of held-out documents."""
    unique: dict[int, str] = {}
    for text in texts:
        unique.setdefault(xxhash.xxh3_128_intdigest(text.encode()), text)

    def find_key(digest: int) -> tuple[int, int]:
        # the definition of the sort key: xxh3_64 of the id's low half
        low = (digest % 2**64).to_bytes(8, "little")
        return xxhash.xxh3_64_intdigest(low, seed=plan.seed), digest

    ordered = sorted(unique, key=find_key)
    held_out = plan.valid_per_10000 * 2**64 // 10_000
    train = [digest for digest in ordered if digest % 2**64 >= held_out]
    return unique, train, [digest for digest in ordered if digest % 2**64 < held_out]


def unique_train(texts: Iterable[str], plan: Recipe) -> list[str]:
    unique, train, _ = select(texts, plan)
    return [unique[digest] for digest in train]


def in_memory(texts: Sequence[str], plan: Recipe) -> dict[str, bytes]:
    """Return the bytes of every file by the definition, the document index unpacked."""
    unique, train, valid = select(texts, plan)
    files = {}
    for name, digests in (("train", train), ("valid", valid)):
        stream = [token for digest in digests for token in tokens_of(unique[digest])]
        windows = max(len(stream) - 1, 0) // plan.seq_len
        if name == "valid":
            files[shards.VALID] = np.array(
                stream[: windows * plan.seq_len + bool(windows)], TOKEN
            ).tobytes()
            continue
        starts = np.cumsum([0, *(len(tokens_of(unique[digest])) for digest in digests)])
        for number, before in enumerate(range(0, windows, plan.windows_per_shard)):
            first, last = (
                w * plan.seq_len for w in (before, min(before + plan.windows_per_shard, windows))
            )
            beginning = [i for i in range(len(digests)) if first <= starts[i] < last]
            ids = np.array([digests[i] % 2**64 for i in beginning], "<u8")
            lengths = np.array([starts[i + 1] - starts[i] for i in beginning], "<u4")
            files[f"shard-{number:05d}.bin"] = np.array(stream[first : last + 1], TOKEN).tobytes()
            origins = [origin_of(unique[digests[i]]).encode() for i in beginning]
            sizes = np.array(list(map(len, origins)), "<u4")
            columns = [ids.tobytes(), lengths.tobytes(), sizes.tobytes()]
            files[f"shard-{number:05d}.docs.zst"] = b"".join(
                [len(beginning).to_bytes(8, "little"), *columns, *origins]
            )
    return files


def read_written(out: Path, source: str) -> dict[str, bytes]:
    """Read the files of `shuffle` in the form of `in_memory`."""
    files = {}
    for path in sorted((out / "shuffle" / source).glob("unit-*/*")):
        if path.name.endswith(".docs.zst"):
            with pyarrow.CompressedInputStream(str(path), "zstd") as stream:
                files[path.name] = stream.read()
        elif path.name != stage.RECEIPT:
            files[path.name] = path.read_bytes()
    return files


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_counts(out: Path, source: str, texts: Sequence[Sequence[str]], lie: int = 0) -> None:
    """Write the counts of `fetch` and `filter`; `lie` is added to the filter's `read`."""
    for number, part in enumerate(texts):
        unit = Unit(source, number)
        # made-up counts, which the manifest must add up
        fetched = {"dropped": {"not_utf8": 1} if number == 0 else {}}
        write_receipt(make_unit_folder(out, "fetch", unit), fetched)
        dropped = {"too_short": 1, "contaminated": 1}
        hits = {"quiz": {"documents": 1, "items": {"12": 1, str(100 + number): 1}}}
        counts = {"read": len(part) + 2 + lie, "cut": 0, "kept": len(part)}
        filtered = {**counts, "dropped": dropped, "contamination": hits}
        write_receipt(make_unit_folder(out, "filter", unit), filtered)


def prepare_texts(
    out: Path, plan: Recipe, texts: dict[str, Sequence[str]], units: int = 2, replace: bool = False
) -> Path:
    for source, passages in texts.items():
        write_counts(out, source, split(passages, units))
    run_shuffle(out, plan, texts, units)
    (out / "tokenizer.model").write_bytes(tokenizer_model())
    manifest.write(plan, out, tuple(texts), Console(quiet=True), replace)
    return out


@functools.cache
def tokenizer_model() -> bytes:
    """Train a model of the project's conventions; `tokens_of` has other pieces."""
    lines = ["some words to learn from, 1 2 3"] * 20
    return tokenizer.train(
        lines, TokenizerTraining(vocab_size=300, train_bytes=1000, character_coverage=1.0)
    )
