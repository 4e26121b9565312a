"""Tapes, words and shared memory: what Python lays out is what the kernels read.

The description of a tape (columns.cuh) is read once more here, number by number; the sizes and places that the
kernels compute are asked of the kernels themselves, built for the CPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from laneformer.engine.cuda.compile import INCLUDES
from laneformer.engine.cuda.geometry import OPS, Geometry, Matrix
from laneformer.engine.cuda.planning import plan
from laneformer.engine.cuda.structures import GraphState, Order, Report, Weights, decode_structure
from laneformer.engine.cuda.tape import order, pack, places, tape_starts
from laneformer.engine.decoder import Sampling
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.shapes import SHAPES, Shape, drawn

CUTS = [
    *SHAPES.values(),
    *(drawn(seed) for seed in range(40, 52)),
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


def matrices(geometry: Geometry) -> dict[tuple[str, int, int], torch.Tensor]:
    """Random 16-bit numbers for every matrix of every lane."""
    random, config = np.random.default_rng(3), geometry.config
    return {
        (op, layer, lane): torch.from_numpy(
            random.integers(
                -(2**15), 2**15, (geometry.matrix(op).rows, geometry.matrix(op).columns), np.int16
            )
        )
        for op in OPS
        for layer in range(config.num_hidden_layers if op != "head" else 1)
        for lane in range(config.num_lanes)
    }


def planned(shape: Shape) -> Geometry:
    return plan(shape.model, shape.dtype, shape.machine(), **shape.plan)


def unpack(geometry: Geometry, tapes: torch.Tensor) -> Iterator[tuple[str, int, int, torch.Tensor]]:
    """The matrices again: (op, layer, lane of the device, int16 (rows, columns))."""
    orders = {op: torch.from_numpy(order(geometry, geometry.matrix(op))) for op in OPS}
    for op, layer, lane, pairs in places(geometry):
        matrix = geometry.matrix(op)
        numbers = torch.empty(matrix.rows * matrix.columns, dtype=tapes.dtype)
        numbers[orders[op]] = torch.cat([tapes[there] for there, _ in pairs])
        yield op, layer, lane, numbers.view(matrix.rows, matrix.columns)


@pytest.mark.parametrize("shape", CUTS, ids=range(len(CUTS)))
def test_unpacked_tapes_are_the_weights(shape: Shape) -> None:
    geometry = planned(shape)
    weights = matrices(geometry)
    for device in range(geometry.devices):
        first = device * geometry.lanes_per_device
        tapes = pack(geometry, lambda op, layer, lane: weights[op, layer, lane], first, "cpu")
        again = {(op, layer, first + lane): matrix for op, layer, lane, matrix in unpack(geometry, tapes)}
        assert set(again) == {key for key in weights if first <= key[2] < first + geometry.lanes_per_device}
        assert all(torch.equal(matrix, weights[key]) for key, matrix in again.items())


@pytest.mark.parametrize("shape", CUTS, ids=range(len(CUTS)))
def test_tapes_start_at_chunks(shape: Shape) -> None:
    """Whole chunks, none wasted: a tape is filled up with less than one, and with zeros."""
    geometry = planned(shape)
    weights = {key: matrix | 1 for key, matrix in matrices(geometry).items()}  # no zero among them
    tapes = pack(geometry, lambda op, layer, lane: weights[op, layer, lane], 0, "cpu")
    starts = tape_starts(geometry)
    assert len(starts) == geometry.lanes_per_device * geometry.warps_per_lane + 1
    assert starts[0] == 0
    assert starts[-1] == 2 * tapes.numel()
    assert not (starts % geometry.chunk_bytes).any()
    for tape in np.split(tapes.numpy(), (starts[1:-1] // 2).astype(int)):
        filling = np.flatnonzero(tape == 0)
        assert filling.size < geometry.chunk_bytes // 2
        np.testing.assert_array_equal(filling, np.arange(tape.size - filling.size, tape.size))
    numbers = sum(weights[key].numel() for key in weights if key[2] < geometry.lanes_per_device)
    assert np.count_nonzero(tapes.numpy()) == numbers


class Reader:
    """A warp that reads its tape as columns.cuh says, in integers, without tape.py's arithmetic."""

    def __init__(self, tape: np.ndarray, geometry: Geometry, block: int, warp: int):
        self.tape, self.at, self.geometry = tape.astype(np.int64), 0, geometry
        self.block, self.warp = block, warp

    def multiply(self, matrix: Matrix, x: np.ndarray, out: np.ndarray) -> None:
        """The next matrix of the tape times x, added to `out`."""
        blocks, warps, tiles = self.geometry.blocks_per_lane, self.geometry.warps, matrix.rows // 16
        first, end = tiles * self.block // blocks, tiles * (self.block + 1) // blocks
        units, columns = (end - first) * matrix.parts, matrix.columns // matrix.parts
        unit, last = units * self.warp // warps, units * (self.warp + 1) // warps
        while unit < last:
            part, row = unit // (end - first), unit % (end - first)
            strip = min(self.geometry.strip, last - unit, end - first - row)
            for column in range(part * columns, (part + 1) * columns, 16):
                for tile in range(strip):
                    self.multiply_tile(x[column : column + 16], out[16 * (first + row + tile) :][:16])
            unit += strip

    def multiply_tile(self, x: np.ndarray, out: np.ndarray) -> None:
        for thread in range(32):
            row, column = thread // 4, thread % 4 * 4
            for pair in range(4):  # of row, row + 8, row, row + 8
                at = column + pair // 2 * 2
                out[row + pair % 2 * 8] += self.tape[self.at : self.at + 2] @ x[at : at + 2]
                self.at += 2


@pytest.mark.parametrize("name", ["delay 2", "alone", "wide heads"])
def test_a_slow_reading_of_the_tape(name: str) -> None:
    geometry = planned(SHAPES[name])
    weights, random, lane = matrices(geometry), np.random.default_rng(4), geometry.config.num_lanes - 1
    first = lane + 1 - geometry.lanes_per_device
    tapes = pack(geometry, lambda op, layer, lane: weights[op, layer, lane], first, "cpu")
    inputs = {op: random.integers(-99, 99, geometry.matrix(op).columns) for op in OPS}
    layers = min(2, geometry.config.num_hidden_layers)
    made = {
        (op, layer): np.zeros(geometry.matrix(op).rows, np.int64)
        for layer in range(layers)
        for op in OPS[:-1]
    }
    starts = (tape_starts(geometry) // 2).astype(int)
    for warp in range(geometry.warps_per_lane):
        tape = (geometry.lanes_per_device - 1) * geometry.warps_per_lane + warp
        own = tapes.numpy()[starts[tape] : starts[tape + 1]]
        reader = Reader(own, geometry, *divmod(warp, geometry.warps))
        for (op, _), out in made.items():
            reader.multiply(geometry.matrix(op), inputs[op], out)
    for (op, layer), out in made.items():
        right = weights[op, layer, lane].numpy().astype(np.int64) @ inputs[op]
        np.testing.assert_array_equal(out, right)


@pytest.mark.skipif(bool(emulator.MISSING), reason=emulator.MISSING)
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
    source = f"#define GRAPH 0\n{geometry.constants()}{LAYOUT.replace('SIZES', sizes_of_all)}"
    library = emulator.build(source, INCLUDES, {"TABLE": "constexpr"}, cuda_builds)
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
