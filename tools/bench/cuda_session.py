"""The model that the steps of `tools.bench cuda` measure, and its decoders."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

from laneformer import LaneformerConfig
from laneformer.engine.cuda.bench import read_bandwidth
from laneformer.engine.cuda.sequence import SequenceDecoder
from laneformer.tensors import Tensor
from tools.check.reference import TORCH_DTYPES, Weights, random_weights, tensors_of

LIMIT_S = 3.0  # a wait inside a kernel takes microseconds
SMALLER_RUNS = 10  # that must be bit-identical, of a smaller model


class Session:
    """One model with random weights on the GPU; everything is made when a step first needs it."""

    device = "cuda:0"

    def __init__(self, flavor: str, dtype: str, runs: int = 100, without: Sequence[str] = ()):
        """`without`: versions that are known to fail."""
        self.flavor, self.dtype, self.runs, self.without = flavor, dtype, runs, without
        self.config, self.deadline = LaneformerConfig.from_flavor(flavor), float("inf")

    def time_left(self) -> float:
        return self.deadline - time.monotonic()

    @functools.cached_property
    def weights(self) -> Weights:
        """bf16 or fp16 matrices."""
        return random_weights(self.config, dtype=TORCH_DTYPES[self.dtype], device=self.device)

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        return tensors_of(self.weights)

    @property
    def version(self) -> str:
        """The better one of those that work."""
        return "graph" if "persistent" in self.without else "persistent"

    def make(
        self, version: str | None = None, config: LaneformerConfig | None = None,
        tensors: dict[str, Tensor] | None = None, limit_s: float = LIMIT_S, dtype: str | None = None, **shape: Any,
    ) -> SequenceDecoder:  # fmt: skip
        """The better version of this model, unless told otherwise; RuntimeError for a version that
        is known to fail.
        """
        version, tensors = version or self.version, tensors or self.tensors
        if version in self.without:
            raise RuntimeError(f"the {version} version failed at its first tokens")
        dtype = dtype or next(iter(tensors.values())).dtype
        decoder = SequenceDecoder(
            config or self.config, tensors, dtype, (self.device,), version, limit_s, **shape
        )
        return as_asked(decoder, version)

    def smaller(self, flavor: str) -> Session:
        """The same for another model, which goes with the step."""
        other = Session(flavor, self.dtype, min(self.runs, SMALLER_RUNS), self.without)
        other.deadline = self.deadline
        return other

    @functools.cache  # noqa: B019  (a session lives as long as its process)
    def decoder(self, version: str | None = None) -> SequenceDecoder:
        """One per version, kept; without a name the better one."""
        return self.decoder(self.version) if version is None else self.make(version)

    @functools.cached_property
    def bandwidth(self) -> dict[str, float]:
        return read_bandwidth(self.decoder().memories[0])


def as_asked(decoder: SequenceDecoder, version: str) -> SequenceDecoder:
    """RuntimeError where another version decodes, so that no figure is of something else."""
    if decoder.version != version:
        raise RuntimeError(f"the {version} version cannot run here; {decoder.version} would decode instead")
    return decoder
