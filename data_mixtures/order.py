"""The order of a training run as pure functions of integers: nothing is stored or drawn in training.

Source weights are integers w_s with sum M. A pattern P of M entries names the source of each sequence
of a block; the rank R of an entry counts the earlier entries of the same source in the block. Global
sequence g lies in block b = g div M at place r = g mod M, comes from source s = P[r] and is that
source's item j = offset_s + b w_s + R[r]. Item j lies in epoch e = j div n_s of a source of n_s
windows; the window is pi(j mod n_s). In epoch 0, pi stays within each shard file, whose documents are
shuffled, and a `stride` separates the windows of a long document. Afterwards pi is a keyed
permutation of the whole source.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import gcd

import numpy as np
import xxhash

RULE = "golden-stride"  # of epoch 0, pinned in locks
MAX_WEIGHT_SUM = 32_768  # keeps the integer comparison of deadlines in `pattern` exact, see there
MAX_QUOTIENT = 5  # Zaremba's conjecture: there are such strides for every number of windows
FEISTEL_ROUNDS = 8
_GOLDEN, _MASK = 0x9E3779B97F4A7C15, 2**64 - 1
_NEVER = np.int64(1) << 62


def pattern(weights: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Interleave sources by integer weights: (P, R), both int64 of shape (sum of weights,).

    P[r] is the source of place r, R[r] the number of earlier places with the same source.

    Raises:
        ValueError: weights are negative, not integers, all zero, or sum to more than MAX_WEIGHT_SUM.
    """
    # Tijdeman's solution of the chairman assignment problem (Discrete Mathematics 32, 1980): with n
    # sources no prefix of the run deviates from its exact share by more than 1 - 1/(2n - 2)
    # sequences, and every block is exact. Taking the largest deficit first has no such bound
    # (docs/decisions/data-order.md).
    _check_weights(weights)
    active = np.flatnonzero(weights)
    w = np.asarray(weights, dtype=np.int64)[active]
    total = int(w.sum())
    slack = max(2 * len(active) - 2, 1)
    served = np.zeros_like(w)
    # lead = due - served, in units of 1 / total
    lead = np.zeros_like(w)
    deadline = _deadlines(served, w, slack)
    places = np.empty(total, dtype=np.int64)
    ranks = np.empty(total, dtype=np.int64)
    for r in range(total):
        lead += w
        # of the sources at least 1/slack behind, the one that would first be too late
        s = (
            int(np.where(slack * lead >= total, deadline, _NEVER).argmin())
            if len(active) > 1
            else 0
        )
        places[r] = active[s]
        ranks[r] = served[s]
        served[s] += 1
        lead[s] -= total
        deadline[s] = _deadlines(served[s], w[s], slack)
    assert not lead.any(), "a block of the pattern must serve every source exactly by its weight"
    return places, ranks


def _deadlines(served: np.ndarray, w: np.ndarray, slack: int) -> np.ndarray:
    # (served + 1 - 1/slack) / w, scaled by slack * 2**32 and floored. Different fractions with
    # denominators up to 2**15 are at least 2**-30 apart, so flooring after the scaling keeps them
    # apart: the comparison is exact.
    return ((slack * (served + 1) - 1) << 32) // w


def _check_weights(weights: Sequence[int]) -> None:
    for i, weight in enumerate(weights):
        if not isinstance(weight, int | np.integer) or isinstance(weight, bool) or weight < 0:
            raise ValueError(f"weight {i} = {weight!r} must be an integer >= 0")
    if not 0 < sum(weights) <= MAX_WEIGHT_SUM:
        raise ValueError(
            f"the weights sum to {sum(weights)}; the sum must be between 1 and {MAX_WEIGHT_SUM}"
        )


def count_served(weights: Sequence[int], places: np.ndarray, sequences: int) -> np.ndarray:
    """Count the first `sequences` sequences by source, in closed form: int64 (sources,)."""
    blocks, rest = divmod(sequences, len(places))
    return blocks * np.asarray(weights, dtype=np.int64) + np.bincount(
        places[:rest], minlength=len(weights)
    )


@lru_cache(maxsize=4096)
def stride(windows: int) -> int:
    """Return the step between the windows that epoch 0 reads: about windows / 1.618."""
    # Windows that lie d apart in the shard are read at least windows / ((MAX_QUOTIENT + 2) d)
    # windows of it apart. Proof: let q_i be the denominators of the convergents of stride /
    # windows. For q_i <= j < q_(i+1), j strides end at least windows / (q_i + q_(i+1)) from where
    # they began (the law of best approximations), and q_(i+1) <= (MAX_QUOTIENT + 1) q_i, so at
    # least windows / ((MAX_QUOTIENT + 2) j) from there.
    golden = windows * _GOLDEN >> 64
    near = (golden + sign * distance for distance in range(windows + 1) for sign in (1, -1))
    fits = (
        candidate for candidate in near if 0 < candidate <= windows and gcd(candidate, windows) == 1
    )
    return next(
        candidate for candidate in fits if max(_quotients(windows, candidate)) <= MAX_QUOTIENT
    )


def _quotients(numerator: int, denominator: int) -> Iterator[int]:
    # the continued fraction of numerator / denominator
    while denominator:
        quotient, rest = divmod(numerator, denominator)
        yield quotient
        numerator = denominator
        denominator = rest


def begin(seed: int, source: str, shard: str, windows: int) -> int:
    """Return the window of a shard that epoch 0 reads first."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{source}/{shard}".encode()) % windows


@lru_cache(maxsize=4096)
def round_keys(seed: int, source: str, epoch: int) -> tuple[int, ...]:
    """Return the 64-bit keys of a source's permutation in an epoch."""
    return tuple(
        xxhash.xxh3_64_intdigest(f"{seed}/{source}/{epoch}/{i}".encode())
        for i in range(FEISTEL_ROUNDS)
    )


def permute(item: int, size: int, keys: Sequence[int]) -> int:
    """Return the place of an item in a keyed permutation of range(size)."""
    # A Feistel network permutes the next power of two; values that fall outside are walked along
    # their cycle until they come back, which keeps it a bijection (Black and Rogaway, Ciphers with
    # Arbitrary Finite Domains, 2002). One item at a time, about 10 us each: arrays would only be
    # faster for batches of hundreds, which no rank reads.
    bits = max(2, (size - 1).bit_length())
    item = _feistel(item, bits, keys)
    while item >= size:
        item = _feistel(item, bits, keys)
    return item


def _feistel(x: int, bits: int, keys: Sequence[int]) -> int:
    low = bits // 2
    low_mask = (1 << low) - 1
    high_mask = (1 << (bits - low)) - 1
    left = x >> low
    right = x & low_mask
    for i, key in enumerate(keys):
        if i % 2:
            right ^= _mix(left, key) & low_mask
        else:
            left ^= _mix(right, key) & high_mask
    return left << low | right


def _mix(x: int, key: int) -> int:
    # 64-bit avalanche: multiply by the golden ratio, fold the high half down, twice
    x = (x + key) * _GOLDEN & _MASK
    x = (x ^ x >> 32) * _GOLDEN & _MASK
    return x ^ x >> 32
