"""Tapes, words and shared memory: what Python lays out is what the kernels read.

The description of a tape (columns.cuh) is read once more here, number by number; the sizes and places that the
kernels compute are asked of the kernels themselves, built for the CPU.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch

from laneformer.engine.cuda.geometry import Geometry
from laneformer.engine.cuda.planning import plan
from laneformer.engine.cuda.structures import GraphState, Order, Report, Weights, decode_structure
from laneformer.engine.cuda.tape import pack, tape_starts
from laneformer.engine.decoder import Sampling
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.emulated import build_unit, needs_emulator
from tests.laneformer.cuda.shapes import SHAPES, Shape, drawn

CUTS = [
    *SHAPES.values(),
    *(drawn(seed) for seed in range(40, 44)),
    Shape({"vocab_size": 72}, blocks=3, warps=5),
]
LAYOUT = r"""
#include "emulator.h"
#include "block.cuh"
struct Where {
  Decode decode;
  int64_t* end;      // of shared memory, as far as any thread's pointers go
  int64_t* aligned;  // the lowest bits that are set in a pointer that is read as float4
};
void where(Where p) {
  Block block(p.decode);
  const char* shared = dynamic_shared();
  const int64_t end = reinterpret_cast<char*>(block.head_scales + kHeadNorms * (kGroup + 1)) - shared;
  if (end > *p.end) *p.end = end;
  for (const float* vector : {block.inputs, block.query, block.fresh})
    *p.aligned |= (reinterpret_cast<const char*>(vector) - shared) % 16;
}
EMULATE(where, Where)
extern "C" void sizes(int64_t* out) {
  int i = 0;
  for (int64_t size : {SIZES}) out[i++] = size;
}
"""


def planned(shape: Shape) -> Geometry:
    return plan(shape.model, shape.dtype, shape.machine(), **shape.plan)


@pytest.mark.parametrize("shape", CUTS, ids=range(len(CUTS)))
def test_tapes_are_whole_chunks(shape: Shape) -> None:
    """A tape starts at a chunk and is filled up with less than one, and with zeros.

    Which number is where: test_prefill.py reads every weight back, test_columns.py multiplies by it.
    """
    geometry = planned(shape)

    def ones(op: str, layer: int) -> torch.Tensor:
        matrix = geometry.matrix(op)
        return torch.ones(geometry.lanes_per_device, matrix.rows, matrix.columns, dtype=torch.int16)

    starts, tapes = tape_starts(geometry), pack(geometry, ones, "cpu")
    assert len(starts) == geometry.lanes_per_device * geometry.warps_per_lane + 1
    assert (starts[0], starts[-1]) == (0, 2 * tapes.numel())
    assert not (starts % geometry.chunk_bytes).any()
    for tape in np.split(tapes.numpy(), starts[1:-1] // 2):
        filling = np.flatnonzero(tape == 0)
        assert filling.size < geometry.chunk_bytes // 2
        np.testing.assert_array_equal(filling, np.arange(tape.size - filling.size, tape.size))


@pytest.mark.job
@needs_emulator
@pytest.mark.parametrize("name", ["delay 2", "delay 0", "at once"])
def test_the_kernels_have_the_same_sizes_and_places(name: str, cuda_builds: Path) -> None:
    """Words, arguments and shared memory, on one device and on two; every pointer that is read
    as float4 is aligned.
    """
    geometry = planned(SHAPES[name])
    decode = decode_structure(geometry.devices)
    fields = [name for name, _ in decode._fields_]
    streams = 4 * geometry.columns * geometry.lanes_per_device * geometry.config.hidden_size
    asked = {
        "kLaneWords": geometry.lane_words, "kInboxWords": geometry.inbox_words,
        "sizeof(Decode)": ctypes.sizeof(decode), "sizeof(Weights)": ctypes.sizeof(Weights),
        "sizeof(Sampling)": ctypes.sizeof(Sampling), "sizeof(Report)": ctypes.sizeof(Report),
        "sizeof(Graph)": ctypes.sizeof(GraphState) + streams, "sizeof(Order)": ctypes.sizeof(Order),
        **{f"offsetof(Decode, {field})": getattr(decode, field).offset for field in fields},
    }  # fmt: skip
    sizes_of_all = ", ".join(f"int64_t({expression})" for expression in asked)
    library = build_unit(geometry, LAYOUT.replace("SIZES", sizes_of_all), cuda_builds)
    sizes = (ctypes.c_int64 * len(asked))()
    library.sizes(sizes)
    assert dict(zip(asked, sizes, strict=True)) == asked

    end, aligned = ctypes.c_int64(), ctypes.c_int64()

    class Where(ctypes.Structure):
        _fields_ = [("decode", decode), ("end", ctypes.c_void_p), ("aligned", ctypes.c_void_p)]

    argument = Where(decode(), ctypes.addressof(end), ctypes.addressof(aligned))
    shape = {"blocks": geometry.blocks, "threads": 32 * geometry.warps, "shared_bytes": geometry.shared_bytes}
    emulator.launch(library, "where", argument, **shape)
    assert end.value == geometry.shared_bytes <= SHAPES[name].machine().shared_bytes
    assert aligned.value == 0
