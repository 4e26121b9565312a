"""CudaDecoder: a Decoder on GPUs. Generation runs in the decode kernel, scores through the PyTorch model."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ...config import LaneformerConfig
from ...tensors import Tensor
from ..decoder import CUDA, Collected, Request, RequestFailed, Sampling, Scores
from ..joined import OneAtATime
from ..options import in_range
from .decoding import Decoding
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


class CudaDecoder(OneAtATime):
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
        self._sharing: list[Decoding] = []  # of a request whose columns share passes
        self._prepare_joined()
        self._request = Request([])
        self._outputs: list[list[int]] = []
        self._running = self._cancelled = False
        self._reused = self._passes = 0
        self._before: list[int] = []  # new tokens of launches before this one
        self._held = (joined_only and self.side_by_side) or self.gpu

    refused_options = CPU_ONLY

    def check(self, request: Request) -> None:
        """ValueError for what only the CPU has."""
        for field in dataclasses.fields(Request):
            value = getattr(request, field.name)
            if field.name in CPU_ONLY and value not in (field.default, []):
                raise ValueError(f"{field.name} = {value!r}: {USE_CPU}")
        if len(request.stop_ids) > MAX_STOPS:
            raise ValueError(f"{len(request.stop_ids)} stop ids; the CUDA engine takes at most {MAX_STOPS}")

    def close(self) -> None:
        """End the request, if one runs, else give the memory back."""
        self.cancel()
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
        return self._joining.max_joined if self._joining else super().max_joined

    def join(self, request: Request) -> int:
        return self._joining.join(request) if self._joining else super().join(request)

    def collect(self, timeout_s: float) -> list[Collected]:
        return self._joining.collect(timeout_s) if self._joining else super().collect(timeout_s)

    def leave(self, ticket: int) -> None:
        self._joining.leave(ticket) if self._joining else super().leave(ticket)

    # one request

    def start(self, request: Request) -> None:
        self._request, self._outputs, self._cancelled, self._sharing = request, [], False, []
        self._reused = self._passes = 0
        self._scores = KeptScores(request.logprobs or 0)
        try:
            if request.score_from:
                self._score(request)
            elif (len(request.prompts) > 1 or request.speculate > 0) and self.side_by_side:
                context = self.config.max_position_embeddings
                self._sharing = [Decoding(request, i, context) for i in range(len(request.prompts))]
                self.side_by_side.passes, self._running = 0, True
            else:
                self._start_next()
        except torch.OutOfMemoryError as error:
            raise RequestFailed(f"the GPU has no memory for this request: {error}") from None

    def _start_next(self) -> None:
        """The next prompt."""
        self._outputs.append([])
        self._launch()

    def _launch(self) -> None:
        """All new tokens that are left of this prompt; with `logprobs`, some of them."""
        r, number, self._before = self._request, len(self._outputs) - 1, self._outputs[-1]
        sampling = Sampling.from_buffer_copy(r.sampling)
        sampling.seed = r.seeds[number] if r.seeds else sampling.seed
        left, made = self._most_new() - len(self._before), len(self._before)
        self.gpu.start(
            [*r.prompts[number], *self._before], left if r.logprobs is None else min(left, SCORED_AT_ONCE), r.stop_ids,
            sampling, r.reuse_prefix or made > 0, request=r, made=made,
        )  # fmt: skip
        self._running = True

    def _most_new(self) -> int:
        """New tokens after the prompt under way, unless a stop id comes."""
        room = self.config.max_position_embeddings - len(self._request.prompts[len(self._outputs) - 1]) + 1
        return min(self._request.max_new_tokens, room)

    def poll(self, from_index: int, timeout_s: float, until_done: bool) -> tuple[list[int], bool]:
        """The first prompt's tokens from an index on, when there are any, all have ended, or the time is up."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._look()
            tokens = self._outputs[0][from_index:] if self._outputs else []
            if not self._running or (tokens and not until_done) or time.monotonic() > deadline:
                return tokens, not self._running
            time.sleep(POLL_S)

    def _look(self) -> None:
        """Take new tokens, notice the end, start the next prompt."""
        if not self._running:
            return
        try:
            if self._sharing:
                self._share()
                return
            tokens, finished = self.gpu.poll()
        except Exception:  # a hang, or the driver's: there is nothing left to wait for
            self._running = False
            raise
        if self._request.logprobs is None or finished:
            self._outputs[-1] = self._before + tokens
        if finished:
            self._running = False
            self._finish(tokens)

    def _share(self) -> None:
        """One pass for all prompts; between two of them a request can end."""
        assert self.side_by_side is not None
        for s in self._sharing:
            s.left = self._cancelled
        self.side_by_side.advance(self._sharing)
        if error := next((s.error for s in self._sharing if s.error), None):
            self.side_by_side.end(self._sharing)
            raise RequestFailed(error)
        self._outputs, self._passes = [s.tokens for s in self._sharing], self.side_by_side.passes
        self._reused = sum(s.reused for s in self._sharing)
        self._running = not all(s.finished for s in self._sharing)

    def _finish(self, tokens: list[int]) -> None:
        """A launch has ended: score its tokens, start the next one."""
        r = self._request
        self._count(len(tokens))
        if r.logprobs is not None and len(self._outputs) == 1:
            self._scores.add(self.gpu.new_logits(len(tokens)), tokens)
        if self._cancelled:
            return
        if tokens and tokens[-1] not in r.stop_ids and len(self._outputs[-1]) < self._most_new():
            self._launch()
        elif len(self._outputs) < len(r.prompts):
            self._start_next()

    def _count(self, made: int) -> None:
        read = len(self._request.prompts[len(self._outputs) - 1]) + len(self._before)
        self._reused += 0 if self._before else self.gpu.reused
        prefilled = read - self.gpu.read_tokens - self.gpu.reused
        self._passes += -(-prefilled // CHUNK_TOKENS) + self.gpu.read_tokens + max(made - 1, 0)

    def cancel(self) -> None:
        self._cancelled = True
        if self._running and not self._sharing:
            self.gpu.cancel()

    def outputs(self) -> list[list[int]]:
        return self._outputs

    def statistics(self) -> dict[str, int]:
        drafts = {
            f"{kind}_tokens": sum(getattr(s, kind) for s in self._sharing)
            for kind in ("proposed", "accepted")
        }
        return {"reused_tokens": self._reused, "passes": self._passes, **drafts}

    def _score(self, r: Request) -> None:
        """Scores of ids[score_from:], or with `keep_logits` the logits after every id;
        all before this returns.
        """
        ids, first = list(r.prompts[0]), r.score_from
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
        return (self._sharing[0].scores if self._sharing else self._scores).part(from_index, count)

    def logits(self) -> np.ndarray:
        return self._logits

    def partials(self) -> np.ndarray:
        raise ValueError(f"keep_partials: {USE_CPU}")
