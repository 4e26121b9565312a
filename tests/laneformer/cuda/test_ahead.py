"""Tests of launches of several passes on the emulator: the tokens of single passes, and a common end."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from laneformer.engine.cuda.structures import Column
from laneformer.engine.decoder import Sampling
from tests.laneformer.cuda.emulated import EmulatedPasses, emulator_proof
from tests.laneformer.cuda.harness import small_config

pytestmark = emulator_proof
SHAPES = {  # windows of 6: positions go beyond them
    "delay 0, int8, every lane on its own device": {
        "config": small_config(broadcast_delay=0),
        "dtype": "int8",
        "devices": 2,
        "blocks_per_lane": 2,
    },
    "delay 2, four lanes on two devices": {
        "config": small_config(broadcast_delay=2, num_lanes=4, num_hidden_layers=5, vocab_size=128),
        "devices": 2,
        "blocks_per_lane": 2,
    },
    "tapes shorter than their rings": {
        "config": small_config(num_hidden_layers=1, swa_layers=(0,)),
        "warps": 4,
    },
}
WAYS = Sampling(top_p=1.0), Sampling(7, 2.0, 1.0, 0.0, 0), Sampling(8, 0.7, 0.9, 0.01, 12)


def columns(tokens, position, **fields) -> list[Column]:
    """Return columns of sequences 2, 1, 0: greedy, drawn, and drawn with filters."""
    # each at its own position
    return [
        Column(token, position + i, 2 - i, sampling=WAYS[i], **fields)
        for i, token in enumerate(tokens)
    ]


def start(passes) -> list[int]:
    """Read the first ids of all three sequences and return the token that follows each."""
    # positions differ: the third starts at 2
    passes.forget()
    for i in range(2):
        passes.run([Column(5 + i, i, s, sampling=WAYS[0]) for s in range(3)])
    for i in range(2):
        passes.run([Column(9, 2 + i, s, sampling=WAYS[0]) for s in range(2 - i)])
    return [11, 12, 13]


def one_by_one(passes, count) -> list[list[int]]:
    tokens, rows = start(passes), []
    for i in range(count):
        (tokens,) = passes.run(columns(tokens, 2 + i))
        rows.append(tokens)
    return rows


@pytest.mark.parametrize("name", SHAPES)
def test_tokens_and_keys_are_those_of_single_passes(name, cuda_builds):
    passes = EmulatedPasses(cuda_builds, 3, **SHAPES[name])
    reference, kv = one_by_one(passes, 9), [m.kv.clone() for m in passes.memories]
    # another order of threads than in the single passes
    first, passes.seed = start(passes), 5
    assert passes.run(columns(first, 2), 8) == reference
    assert all(torch.equal(memory.kv, own) for memory, own in zip(passes.memories, kv, strict=True))
    assert passes.run(columns(start(passes), 2, left=2), 8) == reference[:2], (
        "chunks are under way then"
    )
    assert len({token for row in reference for token in row}) > 6, (
        "a text, not one token again and again"
    )


@pytest.fixture(scope="module")
def two_devices(cuda_builds):
    return EmulatedPasses(cuda_builds, 3, devices=2, blocks_per_lane=2)


@pytest.fixture(scope="module")
def reference(two_devices):
    return one_by_one(two_devices, 6)


def test_lanes_on_two_devices_give_the_bits_of_one(two_devices, reference, cuda_builds):
    # tokens, keys and values; greedy, drawn, and with filters, where one block has all scores
    one_device = EmulatedPasses(cuda_builds, 3, blocks_per_lane=2)
    assert one_by_one(one_device, 6) == one_by_one(two_devices, 6) == reference
    for layer in range(one_device.config.num_hidden_layers):
        halves = [memory.kv_layer(layer) for memory in two_devices.memories]
        assert torch.equal(torch.cat(halves), one_device.memories[0].kv_layer(layer))


def test_each_column_ends_by_itself(two_devices, reference):
    # at a stop id or its last token; the launch ends with the last column, before its last pass
    inputs, first = columns(start(two_devices), 2), two_devices.memories[0].epoch
    stop = next(i for i in range(1, 5) if reference[i][0] not in [row[0] for row in reference[:i]])
    inputs[0].stop_count, inputs[0].stops[:2] = 2, [95 - reference[stop][0], reference[stop][0]]
    inputs[1].left, inputs[2].left = 1, 5
    rows = two_devices.run(inputs, 9)
    assert len(rows) == 5
    for column, last in enumerate((stop, 0, 4)):
        tokens = [row[column] for row in rows]
        assert tokens == [row[column] for row in reference[: last + 1]] + [-1] * (4 - last)
    assert two_devices.memories[0].epoch == first + 10, "no other launch uses these epochs"
    assert two_devices.run(columns(reference[4], 7))[0][2] == reference[5][2], (
        "and nothing is left that confuses the next"
    )


def test_tokens_are_seen_while_the_kernel_runs(two_devices, reference):
    row_counts = []

    def look(rows):
        row_counts.append(len(rows))
        return len(rows) >= 2

    # the host ends the launch after two of its 16 passes; some more may be under way by then
    rows = two_devices.run(columns(start(two_devices), 2), 15, None, look)
    assert rows[:6] == reference[: len(rows)]
    assert row_counts == sorted(row_counts)
    assert row_counts[0] < 2 <= len(rows) < 16
    assert 1 in row_counts, "a pass takes a second here"


def test_builds_share_tiles_caches_and_words(cuda_builds):
    # passes of 1, 4 and 8 columns alternate over one memory; each has the bits of eight alone
    shape = {"sequences": 8, "blocks_per_lane": 2, "dtype": "int8"}
    eight = EmulatedPasses(cuda_builds, 8, **shape)
    builds = EmulatedPasses(cuda_builds, 8, fewer=(1, 4), **shape)
    rings = zip(builds.builds, (5, 3, 2), strict=True)
    builds.builds = [dataclasses.replace(geometry, chunks=chunks) for geometry, chunks in rings]
    builds.geometry = builds.builds[-1]
    passes = [
        [(5, 0, 3)], [(6 + s, 0, s) for s in range(3)], [(6, 1, 3), *((9, 1, s) for s in range(3)), (1, 0, 6)],
        [(7, 2, 3)], [(7, 3 + i, 3) for i in range(8)], [(8, 2, 1), (4, 2, 0)], [(8, 11, 3)],
    ]  # fmt: skip
    for columns_of_pass in passes:
        assert torch.equal(builds.logits(columns_of_pass), eight.logits(columns_of_pass))
    assert builds.run(columns([12], 12), 3) == eight.run(columns([12], 12), 3)
    assert builds.launched == [1, 4, 8, 1, 8, 4, 1, 1]
    assert all(
        torch.equal(a.kv, b.kv) for a, b in zip(builds.memories, eight.memories, strict=True)
    )


def test_what_the_device_cannot_go_on_with_is_refused(two_devices):
    two_sequences = columns([1, 2], 0)
    for inputs, logits in (
        ([two_sequences[0], two_sequences[0]], None),
        (two_sequences, torch.empty(2, 96)),
    ):
        with pytest.raises(
            ValueError, match="extra passes are of one column a sequence, without logits"
        ):
            two_devices.run(inputs, 1, logits)
