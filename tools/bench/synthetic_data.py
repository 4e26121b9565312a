"""Token shards made of a rule instead of text: what speed and golden runs train on, the same on every machine.

One source whose next token is, three times of four, a fixed function of the last one, so that a model has something to
learn; the rest is drawn. Only PCG64's raw stream is used, which NumPy keeps the same in every version.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data_mixtures import mixture, shards

SOURCE = "synthetic"
SEED = 1
FIRST_TOKEN = 3  # below it: unknown, begin, end


def synthetic_tokens(count: int, vocab_size: int, seed: int = SEED) -> np.ndarray:
    """uint16 (count,): x -> 5 x + 1 among the vocabulary's ordinary tokens, broken by drawn ones."""
    raw = np.random.PCG64(seed).random_raw(count)
    ordinary = vocab_size - FIRST_TOKEN
    drawn = (raw >> np.uint64(32)) % np.uint64(ordinary)
    follows = (raw & np.uint64(3)) != 0
    tokens = np.empty(count, dtype=np.uint16)
    last = 0
    for i, (step, fresh) in enumerate(zip(follows.tolist(), drawn.tolist(), strict=True)):
        last = (5 * last + 1) % ordinary if step else fresh
        tokens[i] = FIRST_TOKEN + last
    return tokens


def write_synthetic_lock(folder: Path, windows: int, seq_len: int, vocab_size: int) -> Path:
    """A source of `windows` windows with its manifest, and the lock of one phase that reads it; returns the lock."""
    source = folder / SOURCE
    source.mkdir(parents=True)
    layout = shards.Layout(seed=SEED, seq_len=seq_len, windows_per_shard=windows, valid_per_10000=1)
    tokens = synthetic_tokens((windows + 1) * seq_len + 1, vocab_size)
    train, held_out = tokens[: windows * seq_len + 1], tokens[windows * seq_len :]
    one_document = np.array([len(train)], dtype=np.uint32)
    written = shards.write_train(source, train, one_document, np.zeros(1, dtype=np.uint64), layout)
    manifest = {
        "format": shards.FORMAT,
        "category": "web",
        "seq_len": seq_len,
        "tokenizer_sha256": "",
        "vocab_size": vocab_size,
        **written,
        "valid": shards.write_windows(source / shards.VALID, held_out, seq_len),
    }
    shards.write_json(source / shards.MANIFEST, manifest)
    entry = {"name": SOURCE, "category": "web", "weight": 1, "windows": windows, "epoch_cap": 1_000_000}
    lock = {
        "format": shards.FORMAT,
        "phase": "phase1",
        "seed": SEED,
        "seq_len": seq_len,
        "packing": mixture.PACKING,
        "tokenizer_sha256": "",
        "vocab_size": vocab_size,
        "sources": [{**entry, "manifest_sha256": shards.manifest_sha256(source)}],
    }
    path = folder / "phase1.lock.json"
    shards.write_json(path, {**lock, "fingerprint": mixture.fingerprint(lock)})
    return path
