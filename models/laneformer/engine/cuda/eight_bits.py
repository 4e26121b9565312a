"""Weights of 8 bits: a number of the row's own scale, fp32. int8 is the CPU engine's, number by
number; fp8 is e4m3.

A tape has the numbers as the kernels unpack them (rows.cuh): int8 as bytes from 1 to 255,
128 above the number.
"""

from __future__ import annotations

import torch

from ..cpu._core import quantise_rows

LARGEST_FP8 = 448.0


def quantised(values: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 (..., rows, columns) as int8 (..., rows, columns), coded for the tapes, and
    scales float32 (..., rows).

    A scale is not finite where a value of its row is not.
    """
    if dtype == "int8":
        numbers, scales = map(torch.from_numpy, quantise_rows(values.flatten(0, -2).numpy()))
        return numbers.view(values.shape) ^ -128, scales.view(values.shape[:-1])
    scales = values.abs().amax(-1) / LARGEST_FP8
    scales[scales < torch.finfo(torch.float32).tiny] = 0  # too small to divide by
    ratios = torch.where(scales[..., None] > 0, values / scales[..., None], 0)
    return ratios.to(torch.float8_e4m3fn).view(torch.int8), scales


def dequantised(numbers: torch.Tensor, scales: torch.Tensor, dtype: str) -> torch.Tensor:
    """What coded int8 (..., rows, columns) and scales (..., rows) stand for, in float32."""
    values = numbers ^ -128 if dtype == "int8" else numbers.view(torch.float8_e4m3fn)
    return values.float() * scales[..., None]
