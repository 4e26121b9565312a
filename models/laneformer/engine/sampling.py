"""The rule by which a token is drawn, as both decoders take it; only the standard library is imported."""

from __future__ import annotations

import ctypes


class Sampling(ctypes.Structure):
    """How a token is drawn (sampling.h: Sampling)."""

    _fields_ = [
        ("seed", ctypes.c_uint64),
        ("inverse_temperature", ctypes.c_float),
        ("top_p", ctypes.c_float),
        ("min_p", ctypes.c_float),
        ("top_k", ctypes.c_int),
    ]
