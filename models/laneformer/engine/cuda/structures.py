"""The kernels' arguments as C structures with the fields of block.cuh and probe.cu, and their limits."""

from __future__ import annotations

import ctypes
import functools

from ..sampling import Sampling

MAX_COLUMNS = 8  # of one pass: what a matrix-multiply instruction has
MAX_STOPS = 16
# at most, of columns that draw (passes.cu); unproven on a GPU: the driver beside such a kernel
PASSES_PER_LAUNCH = 16
ENDS = 1 << 30  # in the word of a chosen token: its column ends with it (block.cuh: kEnds)
TOKEN_BITS = ENDS - 1
WEIGHTS = ("tapes", "tape_at", "scales", "embedding", "norms", "rope", "kv", "biases", "head_norms")
EXCHANGES = (
    "stream",
    "q/k/v",
    "partial attention",
    "activation",
    "mail",
    "best token",
    "scores",
    "choice",
)


class Weights(ctypes.Structure):
    """Device pointers to what a device holds of the model (decode.cuh: Weights)."""

    _fields_ = [(name, ctypes.c_void_p) for name in WEIGHTS]


class Column(ctypes.Structure):
    """A token at a position of a sequence (block.cuh: Column)."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("token", "position", "sequence", "left", "stop_count")),
        ("stops", ctypes.c_int * MAX_STOPS),
        ("sampling", Sampling),
    ]


class Order(ctypes.Structure):
    """What a launch has to do (block.cuh: Order)."""

    _fields_ = [
        ("logits", ctypes.c_void_p),
        ("epoch", ctypes.c_uint32),
        ("column_count", ctypes.c_int),
        ("extra_passes", ctypes.c_int),
        ("columns", Column * MAX_COLUMNS),
    ]


class GraphState(ctypes.Structure):
    """The head of the graph version's memory; the lanes' streams follow (block.cuh: Graph)."""

    _fields_ = [
        ("order", Order),
        ("tokens", ctypes.c_int * MAX_COLUMNS),
        ("steps", ctypes.c_int * MAX_COLUMNS),
    ]

    @classmethod
    def of(cls, order: Order) -> GraphState:
        return cls(order, (ctypes.c_int * MAX_COLUMNS)(*(column.token for column in order.columns)))


class Report(ctypes.Structure):
    """The first wait that was given up (exchange.cuh: Report)."""

    _fields_ = [
        (name, ctypes.c_int) for name in ("set", "exchange", "layer", "lane", "block", "warp")
    ] + [("epoch", ctypes.c_uint32)]

    def describe(self, limit_s: float) -> str:
        return (
            f"the pass kernel waited {limit_s} s in vain: lane {self.lane}, layer {self.layer}, exchange "
            f"{EXCHANGES[self.exchange]!r}, block {self.block}, warp {self.warp}, epoch {self.epoch}"
        )


@functools.cache  # of all launches
def decode_structure(devices: int) -> type[ctypes.Structure]:
    """Return the type of all kernels' argument on so many devices (block.cuh: Decode)."""
    pointers = ("aborted", "report", "cancel", "picks", "graph")

    class Decode(ctypes.Structure):
        _fields_ = [
            ("weights", Weights),
            ("lane_words", ctypes.c_void_p),
            ("inbox", ctypes.c_void_p * devices),
            *((name, ctypes.c_void_p) for name in pointers),
            ("limit_ns", ctypes.c_uint64),
            *((name, ctypes.c_int) for name in ("device", "first_lane", "layer", "module")),
            ("order", Order),
        ]

    return Decode


class Probe(ctypes.Structure):
    """The argument of the kernel that reads all tapes (probe.cu: Probe)."""

    _fields_ = [
        ("tapes", ctypes.c_void_p),
        ("tape_at", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("rounds", ctypes.c_int),
    ]
