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
    tokens = {SOURCE: synthetic_tokens((windows + 1) * seq_len + 1, vocab_size)}
    return write_lock(folder, tokens, {SOURCE: 1}, seq_len, vocab_size, windows_per_shard=windows)


def write_lock(
    folder: Path, tokens: dict[str, np.ndarray], weights: dict[str, int], seq_len: int, vocab_size: int,
    windows_per_shard: int,
) -> Path:  # fmt: skip
    """Shards and manifest of every source, and the lock of one phase that reads them; returns the lock.

    tokens[name]: uint16, whole windows and one token more; the last window is held out for validation.
    """
    of_tokens = {"tokenizer_sha256": "", "vocab_size": vocab_size}
    layout = shards.Layout(seed=SEED, seq_len=seq_len, windows_per_shard=windows_per_shard, valid_per_10000=1)
    sources = []
    for name, weight in weights.items():
        source, windows = folder / name, (len(tokens[name]) - 1) // seq_len - 1
        source.mkdir(parents=True)
        train, held_out = tokens[name][: windows * seq_len + 1], tokens[name][windows * seq_len :]
        one_document = np.array([len(train)], dtype=np.uint32)
        written = shards.write_train(source, train, one_document, np.zeros(1, dtype=np.uint64), layout)
        valid = shards.write_windows(source / shards.VALID, held_out, seq_len)
        manifest = {"format": shards.FORMAT, "category": "web", "seq_len": seq_len, **of_tokens, **written,
                    "valid": valid}  # fmt: skip
        shards.write_json(source / shards.MANIFEST, manifest)
        entry = {"name": name, "category": "web", "weight": weight, "windows": windows, "epoch_cap": 1_000_000}
        sources.append({**entry, "manifest_sha256": shards.manifest_sha256(source)})
    lock = {"format": shards.FORMAT, "phase": "phase1", "seed": SEED, "seq_len": seq_len, "packing": mixture.PACKING,
            **of_tokens, "sources": sources}  # fmt: skip
    path = folder / "phase1.lock.json"
    shards.write_json(path, {**lock, "fingerprint": mixture.fingerprint(lock)})
    return path
