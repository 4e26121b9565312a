"""The kernels' arguments as C structures: block.cuh's Decode, field by field."""

from __future__ import annotations

import ctypes as c

from .geometry import MOST_STOPS, Geometry


class Weights(c.Structure):
    """Device pointers to what a device holds of the model (decode.cuh: Weights)."""

    _fields_ = [(name, c.c_void_p) for name in ("tapes", "tape_at", "embedding", "norms", "rope", "kv")]


class Sampling(c.Structure):
    """How a token is chosen (sampling.cuh: Sampling)."""

    _fields_ = [
        ("seed", c.c_uint64), ("inverse_temperature", c.c_float), ("top_p", c.c_float), ("min_p", c.c_float),
        ("top_k", c.c_int),
    ]  # fmt: skip


class Report(c.Structure):
    """The first wait that was given up (exchange.cuh: Report)."""

    _fields_ = [(name, c.c_int) for name in ("set", "exchange", "layer", "lane", "block", "warp")] + [
        ("epoch", c.c_uint32)
    ]


EXCHANGES = ("stream", "q/k/v", "partial attention", "activation", "mail", "best token", "scores", "choice")


def decode_structure(geometry: Geometry) -> type[c.Structure]:
    """The argument of all kernels for this geometry; it depends on the number of devices alone."""

    class Decode(c.Structure):
        _fields_ = [
            ("weights", Weights),
            ("lane_words", c.c_void_p),
            ("inbox", c.c_void_p * geometry.devices),
            *((n, c.c_void_p) for n in ("aborted", "report", "cancel", "prompt", "tokens", "published", "logits")),
            ("sampling", Sampling),
            ("limit_ns", c.c_uint64),
            ("graph", c.c_void_p),
            ("epoch", c.c_uint32),
            *((n, c.c_int) for n in ("device", "first_lane", "position", "prompt_count", "max_tokens", "stop_count")),
            *((n, c.c_int) for n in ("layer", "module")),
            ("stops", c.c_int * MOST_STOPS),
        ]

    return Decode
