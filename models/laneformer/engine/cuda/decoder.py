"""CudaDecoder: a Decoder on GPUs. Generation runs in the decode kernel, scores through the PyTorch model."""

from __future__ import annotations

import functools
import itertools
import time
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ...config import LaneformerConfig
from ...tensors import Tensor
from ..decoder import CUDA, Collected, Request, RequestFailed, Scores
from ..options import in_range
from .alone import Alone
from .geometry import DTYPES, HALVES, MAX_STOPS
from .launch import NotResident
from .memory import half_of
from .passes import PassDecoder
from .prefill import CHUNK_TOKENS, logits_of
from .scores import KeptScores
from .sequence import POLL_S, SequenceDecoder
from .sharing import JoinedPasses

USE_CPU = "the CUDA engine does not have this option; use device = 'cpu'"
CPU_ONLY = ("masked",)
SCORED_AT_ONCE = 16  # new tokens whose logits are kept: with `logprobs` a launch makes no more


class CudaDecoder:
    """Decodes on one or more GPUs that share the lanes.

    The kernels compute as math="exact" does, but for keys and values in 16 bits; prompts of more than a few
    new tokens, and scores, go through PyTorch in 16 bits. The prompts of a batch, draft tokens, and requests
    that join share passes (passes.py), which round a little differently, so ties may fall to the other side.
    They hold the weights once more, as tiles; where these do not fit the model or the GPU, requests and
    prompts come one after the other, and `speculate` has no effect.
    """

    def __init__(
        self,
        config: LaneformerConfig,
        tensors: Mapping[str, Tensor],
        dtype: str = "auto",
        devices: Sequence[str] = ("cuda:0",),
        *,
        version: str = "persistent",
        threads: int | None = None,
        isa: str | None = None,
        math: str = "auto",
        pin: bool | None = None,
        kv_dtype: str = "auto",
        cache_bytes: int | None = None,
        processes: int = 1,
        joined_only: bool = False,
    ):
        """`dtype` "auto" is the checkpoint's, and bf16 where that is fp32.
        `version`: "persistent" or "graph".

        joined_only: a server's, whose requests all join: only tiles are held, and the tapes of the one-column
        kernel when a request first needs them, or where tiles do not fit.

        ValueError for a model that the kernels cannot hold, and for options of the CPU: threads, isa,
        math, pin, kv_dtype, processes.
        """
        if dtype == "auto":
            dtype = half_of(tensors)
        unsupported = {"threads": threads, "isa": isa, "pin": pin or None}
        unsupported["processes"] = None if processes == 1 else processes
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
        self.config, self._version = config, version
        self._tensors, self._devices, self._cache_bytes = tensors, devices, cache_bytes
        self._alone = Alone(self)
        self._at_work: Alone | JoinedPasses = self._alone  # what requests have joined last
        self._request = Request([])
        self._tokens: list[int] = []
        self._running = self._cancelled = False
        self._reused = self._passes = 0
        self._before: list[int] = []  # new tokens of launches before this one
        self._held = (joined_only and self.side_by_side) or self.gpu

    refused_options = CPU_ONLY

    def check(self, request: Request) -> None:
        """ValueError for what only the CPU has."""
        for name in (*CPU_ONLY, "keep_partials"):
            if value := getattr(request, name):
                raise ValueError(f"{name} = {value!r}: {USE_CPU}")
        if len(request.stop_ids) > MAX_STOPS:
            raise ValueError(f"{len(request.stop_ids)} stop ids; the CUDA engine takes at most {MAX_STOPS}")

    def close(self) -> None:
        """End the requests, if any run, else give the memory back."""
        self.leave_all()
        if not self._running:
            for name in ("gpu", "side_by_side", "_joining", "_held"):
                self.__dict__.pop(name, None)
        torch.cuda.empty_cache()

    @property
    def threads(self) -> int:
        geometry = self._held.geometry
        return geometry.devices * geometry.blocks * geometry.warps * 32

    @property
    def weight_bytes(self) -> int:
        return sum(memory.weight_bytes for memory in self._held.memories)

    @functools.cached_property
    def gpu(self) -> SequenceDecoder:
        return SequenceDecoder(
            self.config,
            self._tensors,
            self.dtype,
            self._devices,
            self._version,
            cache_bytes=self._cache_bytes,
        )

    @functools.cached_property
    def side_by_side(self) -> PassDecoder | None:
        """Made when it is first needed: it holds the weights once more, in tiles. None where it cannot run."""
        loaded = self.__dict__.get("gpu")
        if (loaded.version if loaded else self._version) != "persistent":  # it, too, needs all blocks at once
            return None
        try:
            return PassDecoder(
                self.config, self._tensors, self.dtype, self._devices, cache_bytes=self._cache_bytes
            )
        except (ValueError, NotResident, torch.OutOfMemoryError) as error:
            warnings.warn(f"requests do not share passes, drafts have no effect: {error}", stacklevel=2)
            return None

    # requests that join: in passes, or one at a time where there are none

    @functools.cached_property
    def _joining(self) -> JoinedPasses | None:
        return JoinedPasses(self.side_by_side) if self.side_by_side else None

    @property
    def max_joined(self) -> int:
        return self._joining.max_joined if self._joining else 1

    @property
    def running(self) -> int:
        return self._at_work.running

    def join(self, requests: Sequence[Request], alone: bool = False) -> list[int]:
        """One that is alone, without drafts, is a launch of the kernel of one column."""
        shares = not alone or len(requests) > 1 or requests[0].speculate > 0
        self._at_work = (self._joining if shares else None) or self._alone
        return self._at_work.join(requests, alone)

    def collect(self, timeout_s: float) -> list[Collected]:
        return self._at_work.collect(timeout_s)

    def leave(self, ticket: int) -> None:
        self._at_work.leave(ticket)

    def leave_all(self) -> None:
        self._at_work.leave_all()

    def allow(self, ticket: int, index: int, mask: np.ndarray) -> None:
        raise AssertionError("`check` refuses masked requests")

    # requests that are alone

    def start(self, request: Request) -> None:
        self._request, self._tokens, self._cancelled = request, [], False
        self._reused = self._passes = 0
        self._scores = KeptScores(request.logprobs or 0)
        try:
            self._score(request) if request.score_from else self._launch()
        except torch.OutOfMemoryError as error:
            raise RequestFailed(f"the GPU has no memory for this request: {error}") from None

    def _launch(self) -> None:
        """All new tokens that are left; with `logprobs`, some of them."""
        r, self._before = self._request, self._tokens
        left, made = self._most_new() - len(self._before), len(self._before)
        self.gpu.start(
            [*r.prompt, *self._before], left if r.logprobs is None else min(left, SCORED_AT_ONCE), r.stop_ids,
            r.sampling, r.reuse_prefix or made > 0, request=r, made=made,
        )  # fmt: skip
        self._running = True

    def _most_new(self) -> int:
        """New tokens, unless a stop id comes."""
        room = self.config.max_position_embeddings - len(self._request.prompt) + 1
        return min(self._request.max_new_tokens, room)

    def poll(self, from_index: int, timeout_s: float, until_done: bool) -> tuple[list[int], bool]:
        """New tokens from an index on, and whether these are all; waits for some, the end, or the timeout.

        until_done: only for the end.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._look()
            tokens = self._tokens[from_index:]
            if not self._running or (tokens and not until_done) or time.monotonic() > deadline:
                return tokens, not self._running
            time.sleep(POLL_S)

    def _look(self) -> None:
        """Take new tokens, notice the end."""
        if not self._running:
            return
        try:
            tokens, finished = self.gpu.poll()
        except Exception:  # a hang, or the driver's: there is nothing left to wait for
            self._running = False
            raise
        if self._request.logprobs is None or finished:
            self._tokens = self._before + tokens
        if finished:
            self._running = False
            self._finish(tokens)

    def _finish(self, tokens: list[int]) -> None:
        """A launch has ended: score its tokens, start the next one."""
        r = self._request
        self._count(len(tokens))
        if r.logprobs is not None:
            self._scores.add(self.gpu.new_logits(len(tokens)), tokens)
        if self._cancelled or not tokens or tokens[-1] in r.stop_ids:
            return
        if len(self._tokens) < self._most_new():
            self._launch()

    def _count(self, made: int) -> None:
        read = len(self._request.prompt) + len(self._before)
        self._reused += 0 if self._before else self.gpu.reused
        prefilled = read - self.gpu.read_tokens - self.gpu.reused
        self._passes += -(-prefilled // CHUNK_TOKENS) + self.gpu.read_tokens + max(made - 1, 0)

    def figures(self) -> dict[str, int]:
        """The fields of `Statistics`, of the last `start`."""
        return {"reused_tokens": self._reused, "passes": self._passes}

    def cancel(self) -> None:
        self._cancelled = True
        if self._running:
            self.gpu.cancel()

    def statistics(self) -> dict[str, int]:
        return self._at_work.statistics()

    def _score(self, r: Request) -> None:
        """Scores of ids[score_from:], or with `keep_logits` the logits after every id;
        all before this returns.
        """
        ids, first = list(r.prompt), r.score_from
        start, read = (0, ids) if r.keep_logits else (first - 1, ids[:-1])
        blocks = (
            block
            for h in self.gpu.read(read, start, r.reuse_prefix)
            for block in logits_of(self.gpu.model, h)
        )
        if r.keep_logits:
            self._logits = torch.cat([block.cpu() for block in blocks]).numpy()
        else:
            targets = iter(ids[first:])
            for block in blocks:
                self._scores.add(block, list(itertools.islice(targets, len(block))))
        self._reused, self._passes = self.gpu.reused, -(-(len(read) - self.gpu.reused) // CHUNK_TOKENS)

    def scores(self, from_index: int, count: int) -> Scores:
        return self._scores.part(from_index, count)

    def logits(self) -> np.ndarray:
        return self._logits
