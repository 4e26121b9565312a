"""Shapes of the CUDA kernels: multiprocessors of each lane, warps, tiles and shared memory.

A lane is a group of `blocks_per_lane` blocks of `warps` warps, one block a multiprocessor.
constants.py writes these numbers as C++ text for the kernels; tape.py cuts the weights by them.

    B bytes   D hidden   L lanes   d head dimension
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ...config import LaneformerConfig
from ...joins import MODULES
from .structures import MAX_COLUMNS

OPS = ("qkv", "output", "gate_up", "down", "head")
HALVES = ("bf16", "fp16")
DTYPES = (*HALVES, "int8")  # of matrices; int8 has a scale for each row (int8.py)
WARP_THREADS = 32
SEGMENT_BYTES = 16 * WARP_THREADS
MAX_CHUNKS = 16  # deeper rings hide nothing more
# the keys of such a head need the 168 registers a thread that 12 warps leave; 16 leave 128
LARGE_HEAD, LARGE_HEAD_WARPS = 128, 12
MAX_SPLITS = 16  # of the keys: each reader of the attention merges them all
MAX_DRAFTS = MAX_COLUMNS - 1
TILE = 16  # rows and columns of a matrix that one such instruction takes: a segment
# of a matrix' columns; of tiles' parts, to be dealt evenly to a lane's warps
MAX_PARTS, MIN_UNITS = 16, 768
RESERVED_BYTES = 1024  # of shared memory, which the system keeps of each block
# to try, the best first: fewer warps compute less at once, small chunks read the inputs of a
# matrix more often
WARPS, CHUNK_BYTES = (16, 12, 8, 4, 2, 1), (2048, 1024, SEGMENT_BYTES)


@dataclass(frozen=True)
class Machine:
    """Properties of a GPU that decide the geometry.

    Attributes:
        shared_bytes: Shared memory of a multiprocessor that one block may use.
    """

    multiprocessors: int
    shared_bytes: int
    architecture: int  # 90 for sm_90

    def shared_bytes_per_block(self, blocks: int) -> int:
        """Return what each of `blocks` blocks may use when they are resident together."""
        return (self.shared_bytes + RESERVED_BYTES) // blocks - RESERVED_BYTES


def architecture_name(number: int) -> str:
    """Return NVRTC's name, such as sm_90a."""
    # the "a" enables all instructions
    return f"sm_{number}" + ("a" if number >= 90 else "")


H200 = Machine(132, 227 * 1024, 90)


@dataclass(frozen=True)
class Matrix:
    """One matrix of a lane, (rows, columns), cut into tiles for matrix-multiply instructions.

    A row of tiles stays in one block. The block's warps divide the `parts` of its columns; within a
    part they take all of the block's rows of tiles. A segment is one tile, or with 8 bits two tiles
    side by side.
    """

    rows: int
    columns: int
    parts: int
    thread_numbers: int  # of a segment: 16 bytes

    @property
    def units(self) -> int:
        return self.rows // TILE

    def first_row(self, block: int, blocks: int) -> int:
        return self.units * block // blocks * TILE

    def max_rows(self, blocks: int) -> int:
        # of the busiest block
        return -(-self.units // blocks) * TILE

    def tiles(self, block: int, blocks: int, warp: int, warps: int) -> list[tuple[int, int]]:
        """Return (part, row of tiles) of a warp in its order; rows are counted in the lane."""
        first, end = (self.first_row(b, blocks) // TILE for b in (block, block + 1))
        units = (end - first) * self.parts
        mine = range(units * warp // warps, units * (warp + 1) // warps)
        return [(unit // (end - first), first + unit % (end - first)) for unit in mine]


@dataclass(frozen=True)
class Geometry:
    """Shapes for one model on one kind of GPU; sizes of keys and values are in 16-bit numbers."""

    config: LaneformerConfig
    dtype: str  # of matrices, one of DTYPES
    blocks_per_lane: int
    warps: int
    chunk_bytes: int
    chunks: int
    devices: int = 1
    columns: int = 1  # of one pass at most
    # or "fp16": of the embedding, keys and values; with matrices of 16 bits, theirs
    half: str = "bf16"

    @property
    def number_bytes(self) -> int:
        return 1 if self.dtype == "int8" else 2

    @property
    def lanes_per_device(self) -> int:
        return self.config.num_lanes // self.devices

    @property
    def heads(self) -> int:
        return self.config.num_attention_heads // self.config.num_lanes

    @property
    def heads_per_kv(self) -> int:
        return self.config.num_attention_heads // self.config.num_key_value_heads

    @property
    def splits(self) -> int:
        # blocks that share the keys of one KV head
        return min(MAX_SPLITS, max(1, self.blocks_per_lane // self.config.kv_heads_per_lane))

    @property
    def threads(self) -> int:
        return self.warps * WARP_THREADS

    @property
    def strip(self) -> int:
        # rows of segments that share their columns; they must fit in a chunk
        return min(4, self.chunk_bytes // SEGMENT_BYTES)

    @property
    def mail_slots(self) -> int:
        # twice: the lane that waits for outputs of `delay` layers ago is waited for likewise
        return 2 * self.config.broadcast_delay + 2

    def matrix(self, op: str) -> Matrix:
        c, lanes = self.config, self.config.num_lanes
        kv = c.kv_heads_per_lane * c.head_dim
        rows, columns = {
            "qkv": (self.heads * c.head_dim + 2 * kv, c.hidden_size),
            "output": (c.hidden_size, self.heads * c.head_dim),
            "gate_up": (2 * c.intermediate_size // lanes, c.hidden_size),
            "down": (c.hidden_size, c.intermediate_size // lanes),
            # rows fill up the last tile
            "head": (-(-c.vocab_size // lanes // TILE) * TILE, c.hidden_size),
        }[op]
        numbers = 16 // self.number_bytes
        return Matrix(rows, columns, parts_of(rows, columns, 2 * numbers), numbers)

    def kv_slots(self, layer: int) -> int:
        """Return the positions that one split keeps."""
        context = self.config.max_position_embeddings
        # drafts write before they turn out wrong
        return -(-min((self.config.window(layer) or context) + MAX_DRAFTS, context) // self.splits)

    def kv_layer(self, layer: int) -> int:
        return (
            2
            * self.config.kv_heads_per_lane
            * self.splits
            * self.kv_slots(layer)
            * self.config.head_dim
        )

    @property
    def kv_lane(self) -> int:
        return sum(self.kv_layer(i) for i in range(self.config.num_hidden_layers))

    @property
    def stream_rows(self) -> int:
        return max(self.matrix(op).max_rows(self.blocks_per_lane) for op in ("output", "down"))

    @property
    def column_stride(self) -> int:
        # float32 numbers from one column's inputs to the next's (columns.cuh: padded)
        return -(-max(self.wide, self.narrow) // 32) * 32 + 16

    @property
    def max_sums(self) -> int:
        # float32 numbers: rows of the busiest block, in each part of their columns
        return max(m.max_rows(self.blocks_per_lane) * m.parts for m in map(self.matrix, OPS))

    @property
    def wide(self) -> int:
        """Return the float32 numbers of the wide input buffer."""
        # the buffer also holds each warp's partial attention
        partial = self.warps * self.heads_per_kv * (self.config.head_dim + 2)
        return max(self.config.hidden_size, -(-partial // 4) * 4)

    @property
    def narrow(self) -> int:
        """Return the float32 numbers of the narrow input buffer."""
        c = self.config
        # head_dim: the buffer also holds a new key and value in 16 bits
        return max(c.query_size // c.num_lanes, c.intermediate_size // c.num_lanes, c.head_dim)

    @property
    def fixed_shared_bytes(self) -> int:
        """Return the shared memory beside the ring."""
        # queries, a new key and value; of each column inputs, sums, stream rows, a scale and a
        # token
        head, norms = self.config.head_dim, self.config.qk_norm * (self.heads_per_kv + 1)
        column = self.column_stride + self.max_sums + self.stream_rows + 2
        return (
            4 * ((self.heads_per_kv + 1) * head + norms + self.columns * column + self.warps)
            + 8 * self.warps
        )

    @property
    def shared_bytes(self) -> int:
        return self.fixed_shared_bytes + self.warps * self.chunks * (self.chunk_bytes + 8)

    @property
    def blocks(self) -> int:
        return self.lanes_per_device * self.blocks_per_lane

    @property
    def lane_words(self) -> int:
        c = self.config
        # 8-byte words that a lane's blocks exchange (exchange.cuh: kLaneWords)
        partial = self.heads * self.splits * (c.head_dim + 2)
        return (
            2 * c.hidden_size
            + self.matrix("qkv").rows
            + partial
            + c.intermediate_size // c.num_lanes
        )

    @property
    def inbox_words(self) -> int:
        c = self.config
        # words that all lanes write to every device (exchange.cuh: kInboxWords)
        mail = 2 * self.mail_slots * c.num_lanes * c.hidden_size
        return mail + 2 * c.num_lanes * self.blocks_per_lane + 2 * c.vocab_size + 2

    @property
    def flush_points(self) -> list[tuple[int, int]]:
        """Return (layer, module) of outputs that join with the last module."""
        if not self.config.flush:
            return []
        modules = itertools.product(range(self.config.num_hidden_layers), enumerate(MODULES))
        return [(i, m) for i, (m, name) in modules if self.config.delivers(i, name)]


def parts_of(rows: int, columns: int, segment_columns: int = TILE) -> int:
    """Return how many parts the columns are cut into; their sums are added in order."""
    # depends on the matrix alone, so the order of sums is the same on every GPU
    parts = 1
    while (
        parts < MAX_PARTS
        and rows // TILE * parts < MIN_UNITS
        and columns % (2 * parts * segment_columns) == 0
    ):
        parts *= 2
    return parts
