"""Chunks that are fetched to the L2 ahead of a warp's ring, which the benchmark compares with none.

It changes when bytes are asked for, so every logit must stay the same, bit for bit.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch

from laneformer.config import LaneformerConfig
from laneformer.engine.cuda.compile import INCLUDES
from laneformer.engine.cuda.geometry import H200
from laneformer.engine.cuda.memory import DeviceMemory
from laneformer.engine.cuda.planning import plan
from laneformer.engine.cuda.structures import decode_structure
from laneformer.engine.cuda.tape import tape_starts
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.harness import random_model, tensors_of
from tests.laneformer.cuda.shapes import SHAPES
from tests.laneformer.cuda.test_kernels import text
from tests.proofs import KERNEL_SOURCES

pytestmark = pytest.mark.proof(*KERNEL_SOURCES)
needs_emulator = pytest.mark.skipif(bool(emulator.MISSING), reason=emulator.MISSING)
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
  tape.source = block.own_tape(bytes), tape.bytes = bytes, tape.rounds = 1000;
  tape.start();
  for (int i = 0; i < p.chunks; ++i) {
    tape.need<1>();
    tape.drop(kChunkBytes / kSegmentBytes);
  }
  tape.finish(kChunks);
  *p.count = count;
}
EMULATE(walk, Walk)
"""


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match="prefetch_chunks = -1 must not be negative"):
        plan(LaneformerConfig.from_flavor("2b"), "bf16", H200, prefetch_chunks=-1)


@needs_emulator
def test_the_same_bits(cuda_builds: Path) -> None:
    made = []
    for chunks in (0, 2):
        kernels = SHAPES["delay 2"].emulated(cuda_builds, prefetch_chunks=chunks)
        made.append(kernels.decode(text(kernels, 6), 3))
    assert made[0][0] == made[1][0]
    assert torch.equal(made[0][1], made[1][1])


@needs_emulator
def test_what_is_fetched_ahead_is_what_is_copied_later(cuda_builds: Path) -> None:
    """A warp asks for the chunk that it will copy `prefetch_chunks` copies later, around the end
    of the tape, too.
    """
    shape, rounds, ahead = SHAPES["delay 1"], 3, 2
    geometry = plan(shape.model, shape.dtype, shape.machine(), **shape.plan, prefetch_chunks=ahead)
    tensors = tensors_of(random_model(shape.model, shape.dtype), shape.dtype)
    memory = DeviceMemory(geometry, tensors, 0, "cpu")
    library = emulator.build(
        f"#define GRAPH 0\n{geometry.constants()}{WALK}", INCLUDES, {"TABLE": "constexpr"}, cuda_builds
    )
    lengths = np.diff(tape_starts(geometry).astype(int)) // geometry.chunk_bytes
    walked = rounds * int(lengths.max())
    accesses = np.zeros((2 * geometry.blocks * geometry.warps * (walked + geometry.chunks), 4), np.int64)
    count = ctypes.c_int64()
    decode = decode_structure(geometry.devices)

    class Walk(ctypes.Structure):
        _fields_ = [
            ("decode", decode),
            ("accesses", ctypes.c_void_p),
            ("count", ctypes.c_void_p),
            ("chunks", ctypes.c_int),
        ]

    argument = Walk(
        decode.from_buffer_copy(memory.arguments([memory.inbox])), accesses.ctypes.data,
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
        first = int(tape_starts(geometry)[warp]) // geometry.chunk_bytes
        chunks = [
            (first + i % length) * geometry.chunk_bytes for i in range(walked + geometry.chunks + ahead)
        ]
        copied, fetched = (noted[(noted[:, 0] == warp) & (noted[:, 1] == kind)] for kind in (0, 1))
        assert len(copied) == walked + geometry.chunks
        assert copied[:, 2].tolist() == chunks[: len(copied)]
        assert fetched[:, 2].tolist() == chunks[ahead : len(copied) + ahead]
        assert (noted[:, 3] == geometry.chunk_bytes).all()
