"""Tests that Python and the kernels agree on the layout of words, arguments and shared memory."""

import ctypes

import pytest

from laneformer.engine.cuda.structures import GraphState, Order, Report, Weights, decode_structure
from laneformer.engine.decoder import Sampling
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.emulated import build_unit, needs_emulator
from tests.laneformer.cuda.shapes import SHAPES

# The kernels, built for the CPU, report sizes and offsets. test_prefill.py reads back all weights
# of a tape, and test_kernels.py multiplies by them.
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
  const int64_t end = reinterpret_cast<char*>(block.head_scales + kHeadNorms * (kHeadsPerKv + 1)) - shared;
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


@pytest.mark.job
@needs_emulator
@pytest.mark.parametrize("name", ["delay 2", "delay 0", "at once"])
def test_the_kernels_have_the_same_sizes_and_places(name, cuda_builds):
    # on one device and on two; every pointer that is read as float4 is aligned
    geometry = SHAPES[name].plan_geometry()
    decode = decode_structure(geometry.devices)
    fields = [name for name, _ in decode._fields_]
    streams = 4 * geometry.columns * geometry.lanes_per_device * geometry.config.hidden_size
    expected = {
        "kLaneWords": geometry.lane_words,
        "kInboxWords": geometry.inbox_words,
        "sizeof(Decode)": ctypes.sizeof(decode),
        "sizeof(Weights)": ctypes.sizeof(Weights),
        "sizeof(Sampling)": ctypes.sizeof(Sampling),
        "sizeof(Report)": ctypes.sizeof(Report),
        "sizeof(Graph)": ctypes.sizeof(GraphState) + streams,
        "sizeof(Order)": ctypes.sizeof(Order),
        **{f"offsetof(Decode, {field})": getattr(decode, field).offset for field in fields},
    }
    sizes_of_all = ", ".join(f"int64_t({expression})" for expression in expected)
    library = build_unit(geometry, LAYOUT.replace("SIZES", sizes_of_all), cuda_builds)
    sizes = (ctypes.c_int64 * len(expected))()
    library.sizes(sizes)
    assert dict(zip(expected, sizes, strict=True)) == expected

    end, aligned = ctypes.c_int64(), ctypes.c_int64()

    class Where(ctypes.Structure):
        _fields_ = [("decode", decode), ("end", ctypes.c_void_p), ("aligned", ctypes.c_void_p)]

    argument = Where(decode(), ctypes.addressof(end), ctypes.addressof(aligned))
    shape = {
        "blocks": geometry.blocks,
        "threads": 32 * geometry.warps,
        "shared_bytes": geometry.shared_bytes,
    }
    emulator.launch(library, "where", argument, **shape)
    assert end.value == geometry.shared_bytes <= SHAPES[name].machine().shared_bytes
    assert aligned.value == 0
