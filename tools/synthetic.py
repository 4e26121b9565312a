"""Token shards made by a rule instead of from text, the same on every machine: benchmarks, dry runs and the
golden run train on them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data_mixtures import mixture, shards

SOURCE = "synthetic"
SEED = 1
FIRST_TOKEN = 3  # below it: unknown, begin, end


def synthetic_tokens(count: int, vocab_size: int) -> np.ndarray:
    """uint16 or uint32 (count,): x -> 5 x + 1 among the vocabulary's ordinary tokens, one in four drawn.

    So a model has something to learn. Only PCG64's raw stream is used, which NumPy keeps the
    same in every version.
    """
    raw = np.random.PCG64(SEED).random_raw(count)
    ordinary = vocab_size - FIRST_TOKEN
    drawn = (raw >> np.uint64(32)) % np.uint64(ordinary)
    follows = (raw & np.uint64(3)) != 0
    tokens, last = np.empty(count, dtype=np.uint16 if vocab_size <= 1 << 16 else np.uint32), 0
    for i, (step, fresh) in enumerate(zip(follows.tolist(), drawn.tolist(), strict=True)):
        last = (5 * last + 1) % ordinary if step else fresh
        tokens[i] = FIRST_TOKEN + last
    return tokens


def write_synthetic_lock(folder: Path, windows: int, seq_len: int, vocab_size: int) -> Path:
    """A source of `windows` windows with its manifest, and the lock of one phase that reads
    it; returns the lock.
    """
    tokens = {SOURCE: synthetic_tokens((windows + 1) * seq_len + 1, vocab_size)}
    return write_lock(folder, tokens, {SOURCE: 1}, seq_len, vocab_size, windows_per_shard=windows)


def write_lock(
    folder: Path, tokens: dict[str, np.ndarray], weights: dict[str, int], seq_len: int, vocab_size: int,
    windows_per_shard: int,
) -> Path:  # fmt: skip
    """Shards and manifest of every source, and the lock of one phase that reads them; returns the lock.

    tokens[name]: uint16 or uint32, whole windows and one token more; the last window is
    held out for validation.
    """
    values = ("", vocab_size, next(iter(tokens.values())).itemsize, *range(1, FIRST_TOKEN))
    of_tokens = dict(zip(shards.TOKENIZER_FACTS, values, strict=True))
    stride = windows_per_shard * seq_len
    for name in weights:
        source, windows = folder / name, (len(tokens[name]) - 1) // seq_len - 1
        source.mkdir(parents=True)
        train, held_out = tokens[name][: windows * seq_len + 1], tokens[name][windows * seq_len :]
        cuts = [train[first : first + stride + 1] for first in range(0, windows * seq_len, stride)]
        paths = [source / f"shard-{number:05d}.bin" for number in range(len(cuts))]
        written = [shards.write_windows(path, cut, seq_len) for path, cut in zip(paths, cuts, strict=True)]
        valid = shards.write_windows(source / shards.VALID, held_out, seq_len)
        of_windows = {"windows": windows, "shards": written, "valid": valid}
        manifest = {"category": "web", "seq_len": seq_len, **of_tokens, **of_windows}
        shards.write_manifest(source, manifest)
    return mixture.pin(folder, "phase1", weights, SEED, seq_len, epoch_cap=1_000_000)
