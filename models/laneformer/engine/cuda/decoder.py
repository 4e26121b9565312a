"""CudaDecoder: a Decoder on GPUs, whose executor (executor.py) runs what the schedule plans."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...config import LaneformerConfig
from ...tensors import Tensor
from ..decoder import CUDA, Collected, Ended, EngineLost, Request, RequestFailed
from ..options import in_range
from .executor import CudaExecutor
from .geometry import DTYPES, HALVES
from .graph import RUNNERS
from .launch import NotResident
from .memory import half_of
from .passes import PassRunner

USE_CPU = "the CUDA engine does not have this option; use device = 'cpu'"


class CudaDecoder:
    """Decode on one or more GPUs that share the lanes.

    The kernels compute as math="exact" does, but for keys and values in 16 bits; longer prompts, and
    scores, go through PyTorch in 16 bits. Where the kernel of passes cannot run, and for version="graph",
    requests run one after the other, and `speculate` has no effect.
    """

    def __init__(
        self,
        config: LaneformerConfig,
        tensors: Mapping[str, Tensor],
        dtype: str = "auto",
        devices: Sequence[str] = ("cuda:0",),
        *,
        version: str = "passes",
        threads: int | None = None,
        isa: str | None = None,
        math: str = "auto",
        pin: bool | None = None,
        kv_dtype: str = "auto",
        cache_bytes: int | None = None,
    ):
        """Load the model.

        Args:
            dtype: "auto" is the checkpoint's, and bf16 where that is fp32.
            version: "passes" or "graph".

        Raises:
            ValueError: The kernels cannot hold the model, or an option is the CPU's: threads, isa, math,
                pin, kv_dtype.
        """
        if dtype == "auto":
            dtype = half_of(tensors)
        unsupported = {"threads": threads, "isa": isa, "pin": pin or None}
        unsupported["math"] = None if math in ("auto", "exact") else math
        unsupported["dtype"] = None if dtype in DTYPES else dtype
        unsupported["kv_dtype"] = None if kv_dtype == "auto" else kv_dtype
        for name, value in unsupported.items():
            if value is not None:
                raise ValueError(f"{name} = {value!r}: {USE_CPU}")
        self.dtype, self.math, self.isa = dtype, "exact", CUDA
        self.kv_dtype = dtype if dtype in HALVES else half_of(tensors)
        if cache_bytes is not None:
            cache_bytes = in_range("cache_bytes", cache_bytes, int, 0, 2**63)
        # a head for multi-token prediction drafts on the CPU alone
        self.config = dataclasses.replace(config, num_nextn_predict_layers=0, draft_vocab_size=0)
        passes = make_passes(self.config, tensors, dtype, devices, cache_bytes, version)
        self.executor = CudaExecutor(passes)
        self.max_joined, self._drafts = passes.sequences, passes.sequences > 1
        memories = passes.caches.memories
        self.threads = len(memories) * memories[0].geometry.blocks * memories[0].geometry.threads
        self.weight_bytes = sum(memory.weight_bytes for memory in memories)

    def join(self, requests: Sequence[Request]) -> list[int]:
        for request in requests:
            if request.keep_partials:
                raise ValueError(f"keep_partials = {request.keep_partials!r}: {USE_CPU}")
        if self.failure is not None:
            raise EngineLost(self.failure)
        if not self._drafts:
            requests = [dataclasses.replace(request, speculate=0) for request in requests]
        return self.executor.schedule.join(requests)

    def collect(self, timeout_s: float) -> list[Collected]:
        return [
            Collected(ticket, first, tokens, scores, ended and build_ended(*ended))
            for ticket, first, tokens, scores, ended in self.executor.schedule.collect(timeout_s)
        ]

    @property
    def running(self) -> int:
        return self.executor.schedule.running

    @property
    def failure(self) -> str | None:
        return self.executor.schedule.failure or None

    @property
    def has_hung(self) -> bool:
        """Return whether the GPU no longer answers; the process then cannot end in an orderly way."""
        return self.executor.has_hung

    def leave(self, ticket: int) -> None:
        self.executor.schedule.leave(ticket)

    def leave_all(self) -> None:
        self.executor.schedule.leave_all()

    def allow(self, ticket: int, index: int, mask: np.ndarray) -> None:
        self.executor.schedule.allow(ticket, index, mask)

    def statistics(self) -> dict[str, int]:
        return self.executor.schedule.statistics()

    def close(self) -> None:
        self.leave_all()
        self.executor.close()


def make_passes(
    config: LaneformerConfig,
    tensors: Mapping[str, Tensor],
    dtype: str,
    devices: Sequence[str],
    cache_bytes: int | None,
    version: str,
) -> PassRunner:
    """Return a version's decoder; the graph's, with a warning, where passes cannot run on one GPU."""
    if version not in RUNNERS:
        raise ValueError(
            f"version = {version!r} is unknown; choose from {' and '.join(map(repr, RUNNERS))}"
        )
    if version == "graph" and len(devices) > 1:
        raise ValueError("the graph version runs on one GPU; use version = 'passes' for several")
    try:
        return RUNNERS[version](config, tensors, dtype, devices, cache_bytes=cache_bytes)
    except NotResident as error:
        if len(devices) > 1:
            raise RuntimeError(
                f"{error}; the graph version cannot run instead: use whole GPUs"
            ) from error
        warnings.warn(
            f"the graph version decodes, one request at a time, as the kernel of passes cannot run: {error}",
            stacklevel=4,
        )
    return RUNNERS["graph"](config, tensors, dtype, devices, cache_bytes=cache_bytes)


def build_ended(statistics: dict[str, int], error: Exception | None, *results: Any) -> Ended:
    # a failure of the executor is no mistake of the caller
    reported_error = RequestFailed(str(error)) if isinstance(error, RuntimeError) else error
    return Ended(statistics, reported_error, *results)
