"""The kernels' sampler against the plain way: sort, cut, add the noise, take the highest.

The C++ core draws by the same rule (sampling.h) and must give the same tokens. The noise is Philox (Salmon et
al. 2011) and Gumbel's: computed here in float64 from the same 23 bits, so a token that differs is a fault,
not a rounding; which tokens are kept shows in hundreds of draws from nearly equal probabilities.
"""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from laneformer.engine import GenerationOptions
from laneformer.engine.cpu import _core
from laneformer.engine.cuda.planning import plan
from laneformer.engine.decoder import Sampling
from laneformer.engine.requests import make_request
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.emulated import EmulatedPasses, build_unit, needs_emulator
from tests.laneformer.cuda.harness import SMALL, small_config
from tests.proofs import CORE_SOURCES, KERNEL_SOURCES

pytestmark = [
    pytest.mark.proof(*KERNEL_SOURCES, *CORE_SOURCES),
    needs_emulator,
]

VOCAB, COUNT = 152, 200  # some threads have three logits, some two
LOGITS = np.random.default_rng(0).standard_normal(VOCAB).astype(np.float32)


def sampling(
    temperature: float, seed: int = 0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Sampling:
    return Sampling(seed, 1 / temperature if temperature else 0.0, top_p, min_p, top_k)


class Picks(ctypes.Structure):
    _fields_ = [
        ("sampling", Sampling), ("logits", ctypes.c_void_p), ("words", ctypes.c_void_p), ("tokens", ctypes.c_void_p),
        ("first", ctypes.c_int), ("count", ctypes.c_int),
    ]  # fmt: skip


class Sampler:
    """The sampler's kernel on the emulator."""

    def __init__(self, builds: Path, vocab: int = VOCAB, warps: int = 2):
        self.geometry = plan(small_config(vocab_size=vocab), "bf16", SMALL, warps=warps)
        self.library = build_unit(self.geometry, '#include "sampler.cu"\n', builds)

    def __call__(
        self, logits: np.ndarray, how: Sampling, count: int = COUNT, order: int = 0, first: int = 0
    ) -> np.ndarray:
        """The tokens of `count` positions from `first` on."""
        words, tokens = np.zeros(2 * len(logits), np.uint64), np.full(count, -1, np.int32)
        argument = Picks(how, logits.ctypes.data, words.ctypes.data, tokens.ctypes.data, first, count)
        threads = 32 * self.geometry.warps
        emulator.launch(
            self.library, "pick", argument, blocks=1, threads=threads, shared_bytes=1024, seed=order
        )
        return tokens


@pytest.fixture(scope="module")
def sampler(cuda_builds: Path) -> Sampler:
    return Sampler(cuda_builds)


def philox(seed: int, positions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Philox4x32-10's first word for counters (position, token, 0, 0), broadcast."""
    low = np.uint64(0xFFFFFFFF)
    x = [*np.broadcast_arrays(positions.astype(np.uint64), tokens.astype(np.uint64))]
    x += [np.zeros_like(x[0]), np.zeros_like(x[0])]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * x[0], np.uint64(0xCD9E8D57) * x[2]
        x = [
            b >> np.uint64(32) ^ x[1] ^ np.uint64(key[0]),
            b & low,
            a >> np.uint64(32) ^ x[3] ^ np.uint64(key[1]),
            a & low,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return x[0]


def kept(logits: np.ndarray, how: Sampling) -> np.ndarray:
    """Which tokens the filters leave: by sorting. Equal logits stay or go together."""
    left = np.isfinite(logits)
    x = logits.astype(np.float64)
    if 0 < how.top_k < left.sum():
        left &= x >= np.sort(x[left])[-how.top_k]
    weights = np.where(left, np.exp((x - x[left].max()) * how.inverse_temperature), 0.0)
    if how.top_p < 1:
        falling = np.sort(weights)[::-1]
        reached = np.searchsorted(falling.cumsum(), how.top_p * falling.sum())
        left &= weights >= falling[reached]
    return left & (weights >= how.min_p)


def drawn(logits: np.ndarray, how: Sampling, count: int = COUNT, first: int = 0) -> np.ndarray:
    """The tokens that the kernels must choose at `count` positions from `first` on."""
    if how.inverse_temperature == 0:
        return np.full(count, logits.argmax())
    bits = philox(how.seed, np.arange(first, first + count)[:, None], np.arange(len(logits))[None])
    uniform = ((bits >> np.uint64(9)).astype(np.float64) + 0.5) * 2.0**-23
    scores = logits.astype(np.float64) * how.inverse_temperature - np.log(-np.log(uniform))
    return np.where(kept(logits, how), scores, -np.inf).argmax(1)


def test_philox_is_the_published_one() -> None:
    """Known answers of Random123 1.14 for an all-zero counter and key; the kernels use two
    of the counter's words.
    """
    assert philox(0, np.zeros(1), np.zeros(1))[0] == 0x6627E8D5


def test_the_noise_is_never_infinite(sampler: Sampler) -> None:
    """Here token 77's bits are all ones. Rounded up to 1, they would make the least likely token win."""
    position, token, logits = 573060, 77, LOGITS.copy()
    assert philox(0, np.full(1, position), np.full(1, token))[0] >> np.uint64(8) == 2**24 - 1
    logits[token] = -30
    tokens = sampler(logits, sampling(1.0), 1, first=position)
    np.testing.assert_array_equal(tokens, drawn(logits, sampling(1.0), 1, position))
    assert tokens[0] != token


def test_draws_follow_the_softmax() -> None:
    """Chi-square over the tokens that 20000 draws meet five times or more; a false alarm is
    below one in 10^6.
    """
    count, temperature = 20000, 0.7
    tokens = drawn(LOGITS, sampling(temperature, 3), count)
    weights = np.exp(LOGITS.astype(np.float64) / temperature)
    right = count * weights / weights.sum()
    common = right >= 5

    def distance(right: np.ndarray) -> float:
        made = np.bincount(tokens, minlength=VOCAB)[common]
        return float(
            (((made - right[common]) ** 2 / right[common]).sum() - common.sum()) / np.sqrt(2 * common.sum())
        )

    assert distance(right) < 5.5
    assert distance(np.roll(right, 1).clip(5)) > 5.5


FILTERS: list[dict[str, Any]] = [
    {"top_k": 7}, {"top_k": 10 * VOCAB}, {"top_p": 0.3}, {"top_p": 1e-6}, {"min_p": 0.4}, {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.6}, {"top_p": 0.5, "min_p": 0.55}, {"top_k": 40, "top_p": 0.9, "min_p": 0.3},
]  # fmt: skip
TIED = LOGITS.copy()  # six tokens share the first place, and the cut would go through them
TIED[[3, 40, 70, 71, 110, 151]] = 6.0
# logits, the sampling, and its filters
WAYS = [
    *((LOGITS, how, {}) for how in (sampling(0.3), sampling(4.0, 2**32 + 5), sampling(1.0, 2**64 - 1))),
    *((LOGITS, sampling(3.0, 11, **filters), filters) for filters in FILTERS),
    *((TIED, sampling(1.0, 5, **filters), filters)
      for filters in ({"top_k": 3}, {"min_p": 1.0}, {"top_k": 3, "top_p": 0.9})),
]  # fmt: skip


def test_draws_are_those_of_the_plain_way(sampler: Sampler) -> None:
    for order, (logits, how, filters) in enumerate(WAYS):
        tokens = sampler(logits, how, order=order)
        np.testing.assert_array_equal(tokens, drawn(logits, how), err_msg=str(filters))
        left = kept(logits, how)
        if left.sum() < 12:  # so few that each comes up
            assert set(tokens) == set(np.flatnonzero(left)), filters


def test_more_logits_than_registers(cuda_builds: Path) -> None:
    """2,072 of them for 32 threads, which keep 64 each and read the others, the likeliest, again;
    ties are mixed in.
    """
    logits = (np.random.default_rng(1).standard_normal(2072) * 16).round().astype(np.float32) / 16
    logits[-20:] += 8
    sampler = Sampler(cuda_builds, 2072, 1)
    for filters in ({"top_k": 300, "top_p": 0.5}, {"top_k": 2000}):
        how = sampling(2.0, 4, **filters)
        np.testing.assert_array_equal(sampler(logits, how, 40), drawn(logits, how, 40), err_msg=str(filters))


def test_the_cpu_draws_the_same_tokens(sampler: Sampler) -> None:
    """One seed, one text: on both engines, from the options on. Ties of logits are in it, as
    bf16 weights make them.
    """
    logits = (LOGITS * 8).round() / 8
    for temperature, filters in ((0.0, {}), (3.0, {}), *((0.6, filters) for filters in FILTERS)):
        options = GenerationOptions(temperature=temperature, seed=12, **filters)
        request = make_request(options, [0], VOCAB)
        tokens = sampler(logits, request.sampling)
        on_cpu = [_core.sample(logits, request, [], [], position) for position in range(COUNT)]
        np.testing.assert_array_equal(tokens, on_cpu, err_msg=str(filters))


def test_broken_logits_give_a_token(sampler: Sampler) -> None:
    """All logits broken, or one: a token of the vocabulary, and no broken one beside those that are numbers."""
    ways = [sampling(0.0, 1), sampling(1.0, 1), sampling(1.0, 1, top_k=9, top_p=0.5)]
    for broken, how in itertools.product((np.nan, np.inf, -np.inf), ways):
        everything, one = np.full(VOCAB, broken, np.float32), LOGITS.copy()
        one[77] = broken
        for logits in (everything, one):
            tokens = sampler(logits, how, 3)
            assert ((tokens >= 0) & (tokens < VOCAB)).all()
        assert broken == np.inf or 77 not in tokens


def test_the_whole_kernel_draws_from_its_logits(cuda_builds: Path) -> None:
    emulated = EmulatedPasses(cuda_builds, 3, blocks_per_lane=2)
    ids: list[int] = [5, 17, 60]
    how = sampling(1.0, 9, top_k=8, top_p=0.8)
    tokens, _ = emulated.decode(ids, 6, sampling=how)
    _, logits = emulated.decode(ids + tokens)
    for position, token in enumerate(tokens, len(ids) - 1):
        assert token == drawn(logits[position].numpy(), how, position + 1)[position]
