"""Tests that the kernels' sampler draws the tokens of the C++ core, by the rule in sampling.h."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest

from laneformer.engine import GenerationOptions
from laneformer.engine.cpu import _core
from laneformer.engine.cuda.planning import plan
from laneformer.engine.decoder import Request, Sampling
from laneformer.engine.requests import make_request
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.emulated import EmulatedPasses, build_unit, needs_emulator
from tests.laneformer.cuda.harness import SMALL, small_config
from tests.proofs import CORE_SOURCES, KERNEL_SOURCES

pytestmark = [pytest.mark.proof(*KERNEL_SOURCES, *CORE_SOURCES), needs_emulator]

VOCAB, COUNT = 152, 200  # some threads have three logits, some two
LOGITS = np.random.default_rng(0).standard_normal(VOCAB).astype(np.float32)


def request(temperature, seed=0, vocab=VOCAB, **filters) -> Request:
    return make_request(
        GenerationOptions(temperature=temperature, seed=seed, **filters), [0], vocab
    )


def draw_tokens(logits, how, count=COUNT, first=0) -> list[int]:
    """Return the core's tokens at `count` positions from `first` on."""
    return [_core.sample(logits, how, [], [], position) for position in range(first, first + count)]


class Picks(ctypes.Structure):
    _fields_ = [
        ("sampling", Sampling),
        ("logits", ctypes.c_void_p),
        ("words", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("first", ctypes.c_int),
        ("count", ctypes.c_int),
    ]


class Sampler:
    def __init__(self, builds, vocab=VOCAB, warps=2):
        self.geometry = plan(small_config(vocab_size=vocab), "bf16", SMALL, warps=warps)
        self.library = build_unit(self.geometry, '#include "sampler.cu"\n', builds)

    def __call__(self, logits, how, count=COUNT, order=0, first=0) -> list[int]:
        """Return tokens as `draw_tokens` does, in this order of threads."""
        # -1 marks a position that the kernel did not write
        words, tokens = np.zeros(2 * len(logits), np.uint64), np.full(count, -1, np.int32)
        argument = Picks(
            how.sampling, logits.ctypes.data, words.ctypes.data, tokens.ctypes.data, first, count
        )
        threads = 32 * self.geometry.warps
        emulator.launch(
            self.library, "pick", argument, blocks=1, threads=threads, shared_bytes=1024, seed=order
        )
        return tokens.tolist()


@pytest.fixture(scope="module")
def sampler(cuda_builds):
    return Sampler(cuda_builds)


# engine/test_sampling.py compares the core's filters and draws with NumPy, but not its noise.
def philox(seed, positions, tokens) -> np.ndarray:
    """Return the first word of Philox4x32-10 for counters (position, token, 0, 0), broadcast."""
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
        # the Weyl sequence of Philox's keys
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return x[0]


def test_the_noise_is_philoxs():
    # known answer of Random123 1.14 for an all-zero counter and key; of equal logits, the one with
    # the highest bits is drawn
    assert philox(0, np.zeros(1), np.zeros(1))[0] == 0x6627E8D5
    # a seed beyond 32 bits uses both words of the key
    bits = philox(2**40 + 7, np.arange(COUNT)[:, None], np.arange(VOCAB)[None]) >> np.uint64(9)
    assert (
        draw_tokens(np.zeros(VOCAB, np.float32), request(1.0, 2**40 + 7)) == bits.argmax(1).tolist()
    )


def test_the_noise_is_never_infinite(sampler):
    # token 77's bits are all ones; rounded up to 1, they would make the least likely token win
    position, token, logits = 573060, 77, LOGITS.copy()
    assert philox(0, np.full(1, position), np.full(1, token))[0] >> np.uint64(8) == 2**24 - 1
    logits[token] = -30
    tokens = sampler(logits, request(1.0), 1, first=position)
    assert tokens == draw_tokens(logits, request(1.0), 1, position) != [token]


FILTERS = [
    {"top_k": 7},
    {"top_k": 10 * VOCAB},
    {"top_p": 0.3},
    {"top_p": 1e-6},
    {"min_p": 0.4},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.6},
    {"top_p": 0.5, "min_p": 0.55},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.3},
]
TIED = LOGITS.copy()  # six tokens share the first place, and the cut would go through them
TIED[[3, 40, 70, 71, 110, 151]] = 6.0
ROUNDED = (LOGITS * 8).round() / 8  # ties, as bf16 weights make them
WAYS = [
    *(
        (LOGITS, {"temperature": t, "seed": seed})
        for t, seed in ((0.3, 0), (4.0, 2**32 + 5), (0.0, 1))
    ),
    *((LOGITS, {"temperature": 3.0, "seed": 11, **filters}) for filters in FILTERS),
    *((ROUNDED, {"temperature": 0.6, "seed": 12, **filters}) for filters in FILTERS),
    *(
        (TIED, {"temperature": 1.0, "seed": 5, **filters})
        for filters in ({"top_k": 3}, {"min_p": 1.0}, {"top_k": 3, "top_p": 0.9})
    ),
]


def test_draws_are_those_of_the_core(sampler):
    for order, (logits, options) in enumerate(WAYS):
        how = request(**options)
        assert sampler(logits, how, order=order) == draw_tokens(logits, how), options


def test_more_logits_than_registers(cuda_builds):
    # Each of 32 threads keeps 64 of the 2,072 logits and reads the others, the likeliest, again.
    # Ties are among them.
    # sixteenths, so that many logits are equal
    logits = (np.random.default_rng(1).standard_normal(2072) * 16).round().astype(np.float32) / 16
    logits[-20:] += 8
    sampler = Sampler(cuda_builds, 2072, 1)
    for filters in ({"top_k": 300, "top_p": 0.5}, {"top_k": 2000}):
        how = request(2.0, 4, 2072, **filters)
        assert sampler(logits, how, 40) == draw_tokens(logits, how, 40), filters


def test_broken_logits_give_a_token(sampler):
    # a broken token is not drawn while others are numbers
    ways = [request(0.0, 1), request(1.0, 1), request(1.0, 1, top_k=9, top_p=0.5)]
    for broken, how in itertools.product((np.nan, np.inf, -np.inf), ways):
        # all logits broken, or one alone
        everything, one = np.full(VOCAB, broken, np.float32), LOGITS.copy()
        one[77] = broken
        for logits in (everything, one):
            tokens = sampler(logits, how, 3)
            assert all(0 <= token < VOCAB for token in tokens)
        assert broken == np.inf or 77 not in tokens


def test_the_whole_kernel_draws_from_its_logits(cuda_builds):
    emulated = EmulatedPasses(cuda_builds, 3, blocks_per_lane=2)
    ids = [5, 17, 60]
    how = request(1.0, 9, emulated.config.vocab_size, top_k=8, top_p=0.8)
    tokens, _ = emulated.decode(ids, 6, sampling=how.sampling)
    # the same tokens once more, as a prompt, for the logits that they were drawn from
    _, logits = emulated.decode(ids + tokens)
    assert tokens == [draw_tokens(logits[at].numpy(), how, 1, at)[0] for at in range(2, 8)]
