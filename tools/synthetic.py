"""Write token shards by a rule, the same on every machine, for benchmarks, dry runs, the golden run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data_mixtures import mixture, shards

SOURCE = "synthetic"
SEED = 1
# below it: unknown, begin, end
FIRST_TOKEN = 3


def synthetic_tokens(count: int, vocab_size: int) -> np.ndarray:
    """Return uint16 or uint32 (count,): x -> 5 x + 1 among ordinary tokens, one in four random."""
    # the rule gives a model something to learn; NumPy keeps PCG64's raw stream in every version
    raw = np.random.PCG64(SEED).random_raw(count)
    ordinary = vocab_size - FIRST_TOKEN
    # the upper bits give the token, the lowest two whether it follows the rule
    random_tokens = (raw >> np.uint64(32)) % np.uint64(ordinary)
    follows = (raw & np.uint64(3)) != 0
    tokens, last = np.empty(count, dtype=np.uint16 if vocab_size <= 1 << 16 else np.uint32), 0
    for i, (step, fresh) in enumerate(zip(follows.tolist(), random_tokens.tolist(), strict=True)):
        last = (5 * last + 1) % ordinary if step else fresh
        tokens[i] = FIRST_TOKEN + last
    return tokens


def write_synthetic_lock(folder: Path, windows: int, seq_len: int, vocab_size: int) -> Path:
    """Write a shard of `windows` windows and one held out; return the lock of a phase with them."""
    tokens = synthetic_tokens((windows + 1) * seq_len + 1, vocab_size)
    source = folder / SOURCE
    source.mkdir(parents=True)
    # a shard ends with the first token of the next window
    shard = shards.write_windows(
        source / "shard-00000.bin", tokens[: windows * seq_len + 1], seq_len
    )
    valid = shards.write_windows(source / shards.VALID, tokens[windows * seq_len :], seq_len)
    values = ("", vocab_size, tokens.itemsize, *range(1, FIRST_TOKEN))
    facts = dict(zip(shards.TOKENIZER_FACTS, values, strict=True))
    window_facts = {"windows": windows, "shards": [shard], "valid": valid}
    shards.write_manifest(source, {"category": "web", "seq_len": seq_len, **facts, **window_facts})
    return mixture.pin(folder, "phase1", {SOURCE: 1}, SEED, seq_len, epoch_cap=1_000_000)
