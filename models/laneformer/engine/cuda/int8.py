"""Weights of 8 bits: integers with a float32 scale for each row, the same numbers as the CPU engine's.

A tape has the integers as the kernels unpack them (tape.cuh): as bytes from 1 to 255, 128 above the
number.
"""

from __future__ import annotations

import torch

from ..cpu._core import quantise_rows


def quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 (..., rows, columns) as int8 coded for the tapes, and scales float32 (..., rows)."""
    # a scale is not finite where a value of its row is not
    numbers, scales = map(torch.from_numpy, quantise_rows(values.flatten(0, -2).numpy()))
    return numbers.view(values.shape) ^ -128, scales.view(values.shape[:-1])


def dequantize(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of coded int8 (..., rows, columns) and scales (..., rows)."""
    return (numbers ^ -128).float() * scales[..., None]
