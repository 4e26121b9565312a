"""Tests of what fits a GPU: shared memory, registers, blocks and columns; and of refusals."""

import itertools
from dataclasses import replace

import pytest

from laneformer.engine.cuda.geometry import H200, RESERVED_BYTES, Machine
from laneformer.engine.cuda.passes import count_caches
from laneformer.engine.cuda.planning import plan, plan_builds
from laneformer.llama.config import config_of_llama, lanes_for_gpus
from tests.laneformer.cuda.cards import CARDS, LIMITS, MODELS
from tests.laneformer.cuda.harness import SMALL, small_config
from tests.laneformer.cuda.shapes import SIZES


def test_both_versions_fit_every_card():
    # Rings have at least two chunks, and registers suffice for two blocks of the graph. Builds of
    # passes share memory, so it is cut alike; those of fewer columns have rings at least as deep.
    assert all(1024 * (total - block) == RESERVED_BYTES for total, block, _ in LIMITS.values())
    for card, config in itertools.product(CARDS.values(), MODELS.values()):
        builds = plan_builds(config, "bf16", card.machine)
        (graph,) = plan_builds(config, "bf16", card.machine, "graph")
        for resident, g in (*((1, build) for build in builds), (2, graph)):
            assert resident * g.warps <= 16
            assert g.chunks >= 2
            assert g.blocks <= card.multiprocessors
            assert g.shared_bytes <= card.shared_block
            assert resident * (g.shared_bytes + RESERVED_BYTES) <= card.shared_total
            assert resident * 32 * g.warps <= card.threads
        last = builds[-1]
        assert [g.columns for g in builds] in ([1, 2], [1, 4], [1, 4, 8])
        assert all(replace(g, columns=last.columns, chunks=last.chunks) == last for g in builds)
        assert [g.chunks for g in builds] == sorted((g.chunks for g in builds), reverse=True)
        assert len({(g.kv_lane, g.lane_words, g.inbox_words) for g in builds}) == 1
        assert 2 * last.warps >= plan(config, "bf16", card.machine, columns=1).warps


def test_columns_leave_memory_for_the_ring():
    # the 2b model: eight columns on an H200, fewer where the ring would be too small
    builds = plan_builds(MODELS["2b"], "bf16", H200)
    on_a100 = plan_builds(MODELS["2b"], "bf16", Machine(108, 163 << 10, 80))
    assert (builds[-1].columns, on_a100[-1].columns) == (8, 4)
    free = ((7 << 30, 0), (141 << 30, None), (141 << 30, 2**30))
    assert [count_caches(bytes_, builds[-1], cached) for bytes_, cached in free] == [8, 64, 12]
    with pytest.raises(
        ValueError, match=r"a pass of 8 columns needs 6\.\d GB, 4\.4 of them for weights"
    ):
        count_caches(5 << 30, builds[-1], None)
    eight_bits = plan_builds(MODELS["2b"], "int8", H200)
    assert [g.chunks for g in eight_bits] == [g.chunks for g in builds]


def test_little_memory_makes_chunks_smaller_before_it_takes_warps():
    config = small_config()
    fixed = plan(config, "bf16", Machine(8, 2**20, 90), warps=8).fixed_shared_bytes
    ring = 8 * 2 * 8

    def cut(shared, **options):
        geometry = plan(config, "bf16", Machine(8, shared, 90), **options)
        return geometry.warps, geometry.chunk_bytes, geometry.chunks

    assert cut(2**20) == (16, 2048, 16)
    # of two blocks, the least that fits
    both = 2 * (fixed + ring + 8 * 2 * 512 + RESERVED_BYTES) - RESERVED_BYTES
    assert cut(both, resident=2) == (8, 512, 2)
    assert cut(both - 2, resident=2)[0] == 4
    assert cut(both - 2)[0] == 16, "one block has its own warps"
    assert cut(both, chunk_bytes=2048, resident=2)[:2] == (2, 2048)


REFUSED = [
    ({}, {"dtype": "fp32"}, r"dtype = 'fp32'.*16 or 8 bits; use 'bf16' or 'fp16' or 'int8'"),
    ({"lm_head_type": "lane"}, {}, r"lm_head_type = 'lane'.*vocab_parallel.*use the CPU"),
    ({}, {"devices": 3}, r"3 devices cannot share 2 lanes evenly; use one of \[1, 2\]"),
    ({"num_attention_heads": 16}, {}, r"head dimension 4 .*multiple of 8.*use the CPU"),
    (
        {"intermediate_size": 80},
        {},
        r"the down matrix of a lane, 64 x 40.*multiple of 16.*use the CPU",
    ),
    (
        {"intermediate_size": 96},
        {"dtype": "int8"},
        r"down matrix of a lane, 64 x 48.*multiple of 32 and rows of 16",
    ),
    (
        {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 80},
        {},
        r"the qkv matrix of a lane, 120 x 80.*rows of 16; use the CPU",
    ),
    (
        {},
        {"machine": Machine(1, 2**16, 90)},
        r"2 lanes need 2 multiprocessors, this GPU has 1; use more GPUs",
    ),
    (
        {},
        {"machine": Machine(8, 2000, 90)},
        r"2000 bytes.*ring of two chunks.*\d+ go to activations; use another GPU",
    ),
]


@pytest.mark.parametrize(("config", "options", "message"), REFUSED)
def test_what_does_not_fit_is_refused(config, options, message):
    arguments = {"dtype": "bf16", "machine": SMALL, "warps": 2, **options}
    with pytest.raises(ValueError, match=message):
        plan(small_config(**config), arguments.pop("dtype"), arguments.pop("machine"), **arguments)


def test_lanes_are_shared_evenly_by_gpus():
    def lanes(heads, kv_heads, rows, vocabulary, gpus=1):
        names = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
        return lanes_for_gpus(
            dict(zip(names, (heads, kv_heads, rows, vocabulary), strict=True)), gpus
        )

    assert lanes(32, 8, 14336, 128256) == 8  # Llama 3 8B
    assert lanes(9, 3, 1536, 49152) == 3  # SmolLM2 135M
    assert lanes(32, 8, 14336, 32001) == 1
    assert lanes(32, 8, 14336, 128256, gpus=8) == 8
    assert lanes(9, 3, 1536, 49152, gpus=2) == 2  # which the config then refuses by name
    indivisible = config_of_llama({**SIZES, "vocab_size": 131}, 2)
    with pytest.raises(
        ValueError, match=r"lm_head_type = 'replicate'.*lanes that divide its vocabulary of 131"
    ):
        plan(indivisible, "bf16", SMALL, warps=2)
