"""Tests of the decode kernels on the emulator: logits at every position, for any thread order and layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from laneformer.engine.cuda.structures import Column
from tests.laneformer.cuda.emulated import GREEDY, emulator_proof
from tests.laneformer.cuda.reference import compute_expected, read_one_by_one
from tests.laneformer.cuda.shapes import SHAPES, family

pytestmark = emulator_proof


def text(emulated, count) -> list[int]:
    return torch.randint(
        emulated.config.vocab_size, (count,), generator=torch.Generator().manual_seed(1)
    ).tolist()


# The emulator proves, for all thread orders of a launch (order.h), that words are written before
# they are read and not overwritten early, and that no thread waits for ever. test_faults.py shows
# that these checks and the emulator's find planted faults.
def check(emulated, count, seeds):
    # several columns and thread orders give the same bits; passes ahead give single passes' tokens
    ids = text(emulated, count)
    emulated.forget()
    logits, stored = read_one_by_one(emulated, ids)
    expected = compute_expected(emulated, ids, stored)
    error = float((logits.double() - expected.logits).abs().max())
    assert error <= expected.tolerance, f"off by {error}, tolerance {expected.tolerance}"
    for layer, numbers in enumerate(stored):
        stored_layer = torch.cat(numbers)
        assert (
            (expected.least[layer] <= stored_layer) & (stored_layer <= expected.most[layer])
        ).all(), f"keys or values of layer {layer}"
    right_tokens = emulated.picks([(ids[-1], count - 1, 0)])[0]
    while len(right_tokens) < 4:
        right_tokens += emulated.picks([(right_tokens[-1], count + len(right_tokens) - 1, 0)])[0]
    for seed in seeds:  # the emulator checks the order of the words
        emulated.forget()
        tokens, all_logits = emulated.decode(ids, 4, seed)
        assert torch.equal(all_logits, logits), f"seed {seed}"
        assert tokens == right_tokens, f"seed {seed}"


@pytest.mark.parametrize("name", SHAPES)
def test_every_logit(name, cuda_builds):
    check(SHAPES[name].emulate(cuda_builds), 11, range(3))


GRAPHS = {
    "delay 0": SHAPES["delay 0"],
    "flushed": SHAPES["flushed"],
    "norms of heads, 8 bits": replace(family("qwen 3"), dtype="int8"),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_the_graph_gives_the_same_bits(name, cuda_builds):
    # each replay, too, up to its last tokens; a column that has ended does not advance
    passes = GRAPHS[name].emulate(cuda_builds)
    graph = GRAPHS[name].emulate(cuda_builds, version="graph")
    ids = text(passes, 6)
    tokens, logits = passes.decode(ids, 5)
    assert graph.decode(ids, 5)[0] == tokens
    assert torch.equal(graph.decode(ids)[1], logits)
    stop = next(i for i in range(1, 5) if tokens[i] not in tokens[:i])
    assert graph.decode(ids, 5, stops=[tokens[stop]])[0] == tokens[: stop + 1]
    both = [
        Column(tokens[0], 6, 0, sampling=GREEDY),
        Column(tokens[0], 0, 1, left=2, sampling=GREEDY),
    ]
    rows, right = graph.run(both, 2), passes.run(both, 2)
    assert rows == right
    assert rows[2][1] == -1


def test_logits_that_are_no_numbers_choose_a_token(cuda_builds):
    plain = SHAPES["delay 1"].emulate(cuda_builds)
    plain.memories[0].norms.fill_(float("nan"))
    tokens, logits = plain.decode(text(plain, 2), 2)
    assert logits.isnan().all()
    assert tokens == [plain.config.vocab_size - 1] * 2
