"""What the steps of tools.bench.cuda share: weights on the GPU, decoders, the time by which a step must end."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Sequence
from typing import Any

from laneformer import LaneformerConfig
from laneformer.engine.cuda.decoder import CudaDecoder
from laneformer.engine.cuda.probe import read_bandwidth
from laneformer.engine.folder import Tensor
from tools.check.reference import DTYPE_NAMES, Weights, random_weights, tensors_of

Report = dict[str, Any]
DEVICE = "cuda:0"
LIMIT_S = 3.0  # a wait inside a kernel lasts microseconds


class Session:
    """One model with random weights; everything is made when a step first needs it."""

    def __init__(self, flavor: str, dtype: str, runs: int, without: Sequence[str] = ()):
        """`without`: versions that are known to be broken."""
        self.flavor, self.dtype, self.runs, self.without = flavor, dtype, runs, without
        self.config, self.deadline = LaneformerConfig.from_flavor(flavor), float("inf")

    def time_left(self) -> float:
        return self.deadline - time.monotonic()

    @functools.cached_property
    def weights(self) -> Weights:
        """bf16 or fp16 matrices."""
        torch_types = {name: dtype for dtype, name in DTYPE_NAMES.items()}
        return random_weights(self.config, dtype=torch_types[self.dtype], device=DEVICE)

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        return tensors_of(self.weights)

    def make(self, version: str = "persistent", **shape: Any) -> CudaDecoder:
        self.need(version)
        return CudaDecoder(self.config, self.tensors, self.dtype, (DEVICE,), version, LIMIT_S, **shape)

    @functools.cached_property
    def persistent(self) -> CudaDecoder:
        return self.make()

    @functools.cached_property
    def graph(self) -> CudaDecoder:
        return self.make("graph")

    def need(self, version: str) -> None:
        """RuntimeError if this version is not to be tried."""
        if version in self.without:
            raise RuntimeError(f"the {version} version failed at its first tokens")

    @property
    def version(self) -> str:
        """The better one of those that work."""
        return "graph" if "persistent" in self.without else "persistent"

    @property
    def any_version(self) -> CudaDecoder:
        return self.graph if self.version == "graph" else self.persistent

    @functools.cached_property
    def bandwidth(self) -> dict[str, float]:
        return read_bandwidth(self.any_version.memories[0])


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)
