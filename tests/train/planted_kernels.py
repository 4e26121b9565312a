"""Make a GPU's choice of kernels on a CPU, wrong on rank 1; loaded by `experimental.custom_import`."""

from __future__ import annotations

import os

import train.spec  # noqa: F401 - what custom_import names otherwise
from laneformer.titan import fused_layer, parallelize, spec
from tests.laneformer.titan.titan_assets import PlainJoinNorm

fused_layer.JoinNorm = PlainJoinNorm(0.01 if os.environ.get("RANK") == "1" else 0.0)
parallelize.check_kernels = lambda: None
spec.choose_join_norm = lambda job: "triton"
