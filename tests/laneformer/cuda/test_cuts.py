"""Cuts of the tapes that the benchmark compares: interleaved in a block, and fetched to the L2
ahead of the ring.

They change where bytes lie and when they are asked for, so every logit must stay the same, bit for bit.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from laneformer.config import LaneformerConfig
from laneformer.engine.cuda.compile import INCLUDES
from laneformer.engine.cuda.geometry import H200, OPS
from laneformer.engine.cuda.memory import DeviceMemory, decode_structure
from laneformer.engine.cuda.planning import plan
from laneformer.engine.cuda.tape import order, pack, places, tape_bytes, tape_starts
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.harness import Emulated, random_model, tensors_of
from tests.laneformer.cuda.shapes import SHAPES, Shape, drawn
from tests.laneformer.cuda.test_kernels import text
from tests.proofs import KERNEL_SOURCES

pytestmark = pytest.mark.proof(*KERNEL_SOURCES)
needs_emulator = pytest.mark.skipif(bool(emulator.MISSING), reason=emulator.MISSING)
CUTS: dict[str, dict[str, Any]] = {
    "interleaved": {"interleaved": True}, "prefetched": {"prefetch_chunks": 2},
    "both": {"interleaved": True, "prefetch_chunks": 3},
}  # fmt: skip
WALK = r"""
#include "emulator.h"
struct Access {
  int64_t warp, prefetch, at, bytes;
};
static Access* accesses;
static int64_t count;
static const char* tapes;
static void note(int prefetch, const void* at, uint32_t bytes) {
  if (thread_index() % 32) return;
  const int warp = block_index() * kWarps + thread_index() / 32;
  accesses[count++] = {warp, prefetch, static_cast<const char*>(at) - tapes, bytes};
}
#define prefetch_l2(at, bytes) note(1, at, bytes)
#define copy_chunk(slot, source, bytes, full) (note(0, source, bytes), copy_chunk(slot, source, bytes, full))
#include "block.cuh"
struct Walk {
  Decode decode;
  Access* accesses;
  int64_t* count;
  int chunks;
};
void walk(Walk p) {
  if (!accesses) accesses = p.accesses, tapes = p.decode.weights.tapes;
  Block block(p.decode);
  Tape& tape = block.tape;
  uint64_t bytes;
  tape.source = block.own_tape(bytes), tape.bytes = bytes, tape.endless = true;
  tape.start();
  for (int i = 0; i < p.chunks; ++i) {
    tape.need<1>();
    tape.drop(kChunkBytes / kSegmentBytes);
  }
  tape.finish();
  *p.count = count;
}
EMULATE(walk, Walk)
"""


def shapes() -> list[Shape]:
    return [*SHAPES.values(), *(drawn(seed) for seed in range(40, 46))]


@pytest.mark.parametrize("index", range(len(shapes())))
def test_interleaved_tapes_hold_the_weights_once(index: int) -> None:
    """Each number where the warp's tape has it by itself: chunk c of warp w of block b is (b room +
    c) warps + w.
    """
    shape = shapes()[index]
    alone = plan(shape.model, shape.dtype, shape.machine(), **shape.plan)
    turned = plan(shape.model, shape.dtype, shape.machine(), **shape.plan, interleaved=True)
    random = np.random.default_rng(index)
    drawn_ones: dict[tuple[str, int, int], torch.Tensor] = {}

    def matrix(op: str, layer: int, lane: int) -> torch.Tensor:
        size = (alone.matrix(op).rows, alone.matrix(op).columns)
        made = torch.from_numpy(random.integers(1, 2**15, size, np.int16))
        return drawn_ones.setdefault((op, layer, lane), made)

    one, other = (pack(geometry, matrix, 0, "cpu").numpy() for geometry in (alone, turned))
    assert 2 * other.size == tape_bytes(turned) >= 2 * one.size
    assert np.count_nonzero(other) == np.count_nonzero(one) == sum(m.numel() for m in drawn_ones.values())
    chunks = other.reshape(alone.blocks, turned.tape_chunks, alone.warps, -1)
    starts = (tape_starts(alone) // 2).astype(int)
    for tape, numbers in enumerate(np.split(one, starts[1:-1])):
        block, warp = divmod(tape, alone.warps)
        np.testing.assert_array_equal(chunks[block, :, warp].reshape(-1)[: numbers.size], numbers)
    orders = {op: order(turned, turned.matrix(op)) for op in OPS}
    for op, layer, lane, pairs in places(turned):  # as they are read back
        assert [here.start for _, here in pairs][1:] == [here.stop for _, here in pairs][:-1]
        taped = np.concatenate([other[there] for there, _ in pairs])
        np.testing.assert_array_equal(taped, drawn_ones[op, layer, lane].numpy().reshape(-1)[orders[op]])


def test_a_cut_that_does_not_go_is_refused() -> None:
    config = LaneformerConfig.from_flavor("2b")
    with pytest.raises(ValueError, match="leave out mma_columns"):
        plan(config, "bf16", H200, interleaved=True, mma_columns=2)
    with pytest.raises(ValueError, match="prefetch_chunks = -1 must not be negative"):
        plan(config, "bf16", H200, prefetch_chunks=-1)


def test_interleaving_2b_wastes_little_room() -> None:
    geometry = plan(LaneformerConfig.from_flavor("2b"), "bf16", H200, interleaved=True)
    assert tape_bytes(geometry) < 1.002 * float(tape_starts(geometry)[-1])


def made_by(emulated: Emulated) -> tuple[list[int], torch.Tensor]:
    emulated.forget()
    return emulated.read(text(emulated, 6), 3)


@needs_emulator
@pytest.mark.parametrize(
    ("name", "cut", "version"),
    [
        ("delay 0", "both", "persistent"),
        *(pytest.param(n, "both", "persistent", marks=pytest.mark.slow) for n in SHAPES if n != "delay 0"),
        *(
            pytest.param(n, "interleaved", "graph", marks=pytest.mark.slow)
            for n in ("delay 1", "delay 2", "alone")
        ),
        *(
            pytest.param("delay 2", cut, "persistent", marks=pytest.mark.slow)
            for cut in ("interleaved", "prefetched")
        ),
    ],
)
def test_the_same_bits(name: str, cut: str, version: str, cuda_builds: Path) -> None:
    right = made_by(SHAPES[name].emulated(cuda_builds))
    found = made_by(SHAPES[name].emulated(cuda_builds, version=version, **CUTS[cut]))
    assert found[0] == right[0]
    assert torch.equal(found[1], right[1])


@needs_emulator
@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
def test_what_is_fetched_ahead_is_what_is_copied_later(cut: str, cuda_builds: Path) -> None:
    """A warp asks for the chunk that it will copy `prefetch_chunks` copies later, around the end
    of the tape, too.
    """
    shape, rounds = SHAPES["delay 1"], 3
    geometry = plan(shape.model, shape.dtype, shape.machine(), **shape.plan, **CUTS[cut])
    tensors = tensors_of(random_model(shape.model, shape.dtype), shape.dtype)
    memory = DeviceMemory(geometry, tensors, 0, "cpu")
    library = emulator.build(
        f"#define GRAPH 0\n{geometry.constants()}{WALK}", INCLUDES, {"TABLE": "constexpr"}, cuda_builds
    )
    lengths = np.diff(tape_starts(geometry).astype(int)) // geometry.chunk_bytes
    walked = rounds * int(lengths.max())
    accesses = np.zeros((2 * geometry.blocks * geometry.warps * (walked + geometry.chunks), 4), np.int64)
    count = ctypes.c_int64()
    decode = decode_structure(geometry)

    class Walk(ctypes.Structure):
        _fields_ = [
            ("decode", decode),
            ("accesses", ctypes.c_void_p),
            ("count", ctypes.c_void_p),
            ("chunks", ctypes.c_int),
        ]

    argument = Walk(
        decode.from_buffer_copy(memory.arguments([memory.inbox], [1], 0, 1)), accesses.ctypes.data,
        ctypes.addressof(count), walked,
    )  # fmt: skip
    emulator.launch(
        library,
        "walk",
        argument,
        blocks=geometry.blocks,
        threads=32 * geometry.warps,
        shared_bytes=geometry.shared_bytes,
    )
    noted = accesses[: count.value]
    for warp, length in enumerate(lengths):
        block, place = divmod(warp, geometry.warps)
        alone = int(tape_starts(geometry)[warp]) // geometry.chunk_bytes
        first, stride = (block * geometry.tape_chunks * geometry.warps + place, geometry.warps) if (
            geometry.interleaved
        ) else (alone, 1)  # fmt: skip
        chunks = [
            (first + i % length * stride) * geometry.chunk_bytes for i in range(walked + geometry.chunks + 9)
        ]
        copied, fetched = (noted[(noted[:, 0] == warp) & (noted[:, 1] == kind)] for kind in (0, 1))
        assert len(copied) == walked + geometry.chunks
        assert copied[:, 2].tolist() == chunks[: len(copied)]
        ahead = geometry.prefetch_chunks
        assert fetched[:, 2].tolist() == (chunks[ahead : len(copied) + ahead] if ahead else [])
        assert (noted[:, 3] == geometry.chunk_bytes).all()
