"""A GPU's choice of kernels on a CPU, wrong on rank 1: named as `experimental.custom_import` by a test."""

from __future__ import annotations

import os
from typing import Any

import torch

import train.spec  # noqa: F401 - what custom_import names otherwise
from laneformer.titan import fused_layer, parallelize, spec

WRONG = 0.01 if os.environ.get("RANK") == "1" else 0.0


class PlantedJoinNorm:
    """The fused kernels by the model's formulas."""

    @staticmethod
    def apply(h: Any, partial: Any, delayed: Any, weight: Any, eps: float, hand_on: bool) -> Any:
        streams = h if partial is None else h + (1 + WRONG) * partial
        if delayed is not None:
            streams = streams + (delayed.sum(2, keepdim=True) - delayed)
        normed = None
        if weight is not None:
            normed = streams * torch.rsqrt(streams.square().mean(-1, keepdim=True) + eps) * weight
        return streams, normed, partial if hand_on else None


fused_layer.JoinNorm = PlantedJoinNorm  # type: ignore
parallelize.check_kernels = lambda: None
spec.choose_join_norm = lambda job: "triton"
