"""Lanes on two devices: two emulated grids side by side give what one gives, and end together.

The emulator checks on the way that no word of either device is overwritten before it was read.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from laneformer.engine.cuda.structures import Column
from laneformer.engine.decoder import Sampling
from tests.laneformer.cuda.emulated import GREEDY, EmulatedPasses, needs_emulator

pytestmark = [pytest.mark.job, needs_emulator]
IDS = [7, 80, 33, 2]
# one block draws from the scores of all devices
WAYS = {"greedy": GREEDY, "drawn": Sampling(4, 1.0, 1.0, 0.0, 0), "filters": Sampling(4, 1.0, 0.7, 0.0, 20)}


@pytest.fixture(scope="module")
def one(cuda_builds: Path) -> EmulatedPasses:
    return EmulatedPasses(cuda_builds, 3, blocks_per_lane=2)


@pytest.fixture(scope="module")
def two(cuda_builds: Path) -> EmulatedPasses:
    return EmulatedPasses(cuda_builds, 3, blocks_per_lane=2, devices=2)


@pytest.mark.parametrize("name", WAYS)
def test_two_devices_give_the_bits_of_one_and_end_together(
    name: str, one: EmulatedPasses, two: EmulatedPasses
) -> None:
    """Tokens, logits, keys and values; then a stop id, after which nothing confuses the next request."""
    right, (tokens, logits) = one.decode(IDS, 6, sampling=WAYS[name]), two.decode(IDS, 6, 10, WAYS[name])
    assert tokens == right[0]
    assert torch.equal(logits, right[1])
    for layer in range(one.config.num_hidden_layers):
        halves = [memory.kv_layer(layer) for memory in two.memories]
        assert all(half.any() for half in halves)
        assert torch.equal(torch.cat(halves), one.memories[0].kv_layer(layer))
    stop = next(i for i, token in enumerate(tokens) if i and token not in tokens[:i])
    stops = [95 - tokens[stop], tokens[stop]]
    assert two.decode(IDS, 5, 2, WAYS[name], stops)[0] == tokens[: stop + 1]
    assert not any(memory.hang() for memory in two.memories)
    assert two.decode(IDS, 6, 3, WAYS[name])[0] == tokens


@pytest.mark.parametrize("name", ["greedy", "filters"])
def test_cancel_reaches_both(name: str, two: EmulatedPasses) -> None:
    """The first device hears it and tells all with the token's words."""
    tokens, _ = two.decode(IDS, 2, sampling=WAYS[name])
    two.seed, column = 4, Column(tokens[0], len(IDS), 0, sampling=WAYS[name])
    arguments, first = two._arguments([column], 5, None), two.memories[0].epoch - 6
    two.memories[0].cancel.fill_(1)
    two._launch(arguments)
    two._streams[0].synchronize()
    assert two.memories[0].picked(first, 1) == [tokens[1:]]
