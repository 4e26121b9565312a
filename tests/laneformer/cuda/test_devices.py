"""Lanes on two devices: two emulated grids side by side give what one gives, and end together.

The emulator checks on the way that no word of either device is overwritten before it was read.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from laneformer.engine.cuda.structures import Column
from laneformer.engine.decoder import Sampling
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.emulated import GREEDY, EmulatedPasses

pytestmark = [pytest.mark.job, pytest.mark.skipif(bool(emulator.MISSING), reason=emulator.MISSING)]
IDS = [7, 80, 33, 2]
FILTERED = Sampling(4, 1.0, 0.7, 0.0, 20)


@pytest.fixture(scope="module")
def one(cuda_builds: Path) -> EmulatedPasses:
    return EmulatedPasses(cuda_builds, 3, blocks_per_lane=2)


@pytest.fixture(scope="module")
def two(cuda_builds: Path) -> EmulatedPasses:
    return EmulatedPasses(cuda_builds, 3, blocks_per_lane=2, devices=2)


def test_the_same_bits(one: EmulatedPasses, two: EmulatedPasses) -> None:
    """Tokens, logits, keys and values; each device writes the logits of its own lanes' vocabulary."""
    right, (tokens, logits) = one.decode(IDS, 6), two.decode(IDS, 6, seed=10)
    assert tokens == right[0]
    assert torch.equal(logits, right[1])
    for layer in range(one.config.num_hidden_layers):
        halves = [memory.kv_layer(layer) for memory in two.memories]
        assert all(half.any() for half in halves)
        assert torch.equal(torch.cat(halves), one.memories[0].kv_layer(layer))


def test_the_same_draws(one: EmulatedPasses, two: EmulatedPasses) -> None:
    """With filters, one block draws from the scores of all devices."""
    greedy, _ = one.decode(IDS, 5)
    for how in (Sampling(4, 1.0, 1.0, 0.0, 0), FILTERED, Sampling(4, 1.0, 1.0, 0.2, 0)):
        right, (tokens, _) = one.decode(IDS, 5, sampling=how), two.decode(IDS, 5, seed=1, sampling=how)
        assert tokens == right[0] != greedy


@pytest.mark.parametrize("how", [GREEDY, FILTERED], ids=["greedy", "filters"])
def test_a_stop_id_ends_both(two: EmulatedPasses, how: Sampling) -> None:
    tokens, _ = two.decode(IDS, 5, sampling=how)
    stop = next(i for i, token in enumerate(tokens) if i and token not in tokens[:i])
    assert (
        two.decode(IDS, 5, seed=2, sampling=how, stops=[95 - tokens[stop], tokens[stop]])[0]
        == tokens[: stop + 1]
    )
    for memory in two.memories:  # and nothing is left that confuses the next request
        assert not memory.hang()
    assert two.decode(IDS, 5, seed=3, sampling=how)[0] == tokens


@pytest.mark.parametrize("how", [GREEDY, FILTERED], ids=["greedy", "filters"])
def test_cancel_reaches_both(two: EmulatedPasses, how: Sampling) -> None:
    """The first device hears it and tells all with the token's words."""
    tokens, _ = two.decode(IDS, 2, sampling=how)
    two.seed, column = 4, Column(tokens[0], len(IDS), 0, sampling=how)
    two.memories[1].cancel.fill_(1)  # nobody asks there
    assert [row[0] for row in two.run([column], 5, None, lambda rows: True)][:1] == tokens[1:]
    arguments, first = two._arguments([column], 5, None), two.memories[0].epoch - 6
    two.memories[0].cancel.fill_(1)
    two._launch(arguments)
    two._streams[0].synchronize()
    assert two.memories[0].picked(first, 1) == [tokens[1:]]
