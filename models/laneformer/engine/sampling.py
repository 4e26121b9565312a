"""The sampling parameters of both decoders, with the standard library alone."""

from __future__ import annotations

import ctypes


class Sampling(ctypes.Structure):
    """The parameters by which a token is drawn (sampling.h: Sampling)."""

    _fields_ = [
        ("seed", ctypes.c_uint64),
        ("inverse_temperature", ctypes.c_float),
        ("top_p", ctypes.c_float),
        ("min_p", ctypes.c_float),
        ("top_k", ctypes.c_int),
    ]
