"""Lanes on two devices: two emulated grids side by side give what one gives, and end together.

The emulator checks on the way that no word of either device is overwritten before it was read.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from laneformer.engine.decoder import Sampling
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.harness import Emulated, small_config

pytestmark = pytest.mark.skipif(bool(emulator.MISSING), reason=emulator.MISSING)
IDS = [7, 80, 33, 2]


@pytest.fixture(scope="module")
def one(cuda_builds: Path) -> Emulated:
    return Emulated(small_config(), cuda_builds, blocks_per_lane=2)


@pytest.fixture(scope="module")
def two(cuda_builds: Path) -> Emulated:
    return Emulated(small_config(), cuda_builds, blocks_per_lane=2, devices=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_same_bits(one: Emulated, two: Emulated, seed: int) -> None:
    """Tokens, logits, keys and values; each device writes the logits of its own lanes' vocabulary."""
    right, (tokens, logits) = one.read(IDS, 6, seed), two.read(IDS, 6, seed + 10)
    assert tokens == right[0]
    assert torch.equal(logits, right[1])
    for layer in range(one.config.num_hidden_layers):
        halves = [memory.kv_layer(layer) for memory in two.memories]
        assert all(half.any() for half in halves)
        assert torch.equal(torch.cat(halves), one.memories[0].kv_layer(layer))


@pytest.mark.parametrize(
    "how", [Sampling(4, 1.0, 1.0, 0.0, 0), Sampling(4, 1.0, 0.7, 0.0, 20), Sampling(4, 1.0, 1.0, 0.2, 0)]
)
def test_the_same_draws(one: Emulated, two: Emulated, how: Sampling) -> None:
    """With filters, one block draws from the scores of all devices."""
    right, (tokens, _) = one.read(IDS, 5, sampling=how), two.read(IDS, 5, seed=1, sampling=how)
    assert tokens == right[0]
    assert tokens != one.read(IDS, 5)[0]


@pytest.mark.parametrize("how", [None, Sampling(4, 1.0, 0.7, 0.0, 20)], ids=["greedy", "filters"])
def test_a_stop_id_ends_both(two: Emulated, how: Sampling | None) -> None:
    tokens, _ = two.read(IDS, 5, sampling=how)
    stop = next(i for i, token in enumerate(tokens) if i and token not in tokens[:i])
    assert (
        two.read(IDS, 5, seed=2, sampling=how, stops=[95 - tokens[stop], tokens[stop]])[0]
        == tokens[: stop + 1]
    )
    for memory in two.memories:  # and nothing is left that confuses the next request
        assert not memory.hang()
    assert two.read(IDS, 5, seed=3, sampling=how)[0] == tokens


@pytest.mark.parametrize("how", [None, Sampling(4, 1.0, 0.7, 0.0, 20)], ids=["greedy", "filters"])
def test_cancel_reaches_both(two: Emulated, how: Sampling | None) -> None:
    """The first device hears it and tells all with the token's words; the prompt may be under way still."""
    tokens, _ = two.read(IDS[:1], 5, sampling=how)
    arguments = two.arguments(IDS[:1], 0, 5, sampling=how)
    two.memories[0].cancel.fill_(1)
    assert two.launch(arguments, seed=4) == tokens[:1]
    arguments = two.arguments(IDS, 0, 5, sampling=how)
    two.memories[0].cancel.fill_(1)
    assert two.launch(arguments, seed=5) == []
