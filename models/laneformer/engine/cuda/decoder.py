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
from ...tensors import FIRST_MATRIX, Tensor
from ..decoder import CUDA, Request, RequestFailed, Sampling
from ..joined import OneAtATime
from ..options import in_range
from .geometry import DTYPES, MOST_STOPS
from .launch import NotResident
from .passes import Decoding, PassDecoder, decodings, shares_passes
from .prefill import CHUNK_TOKENS, logits_of
from .sequence import POLL_S, SequenceDecoder

USE_CPU = "the CUDA engine does not have this option; use device = 'cpu'"
CPU_ONLY = ("masked",)
SCORED_AT_ONCE = 16  # new tokens whose logits are kept: with `logprobs` a launch makes no more


class CudaDecoder(OneAtATime):
    """Decodes on one or more GPUs that share the lanes.

    The kernels compute as math="exact" does, but for keys and values in 16 bits; prompts of more than a few new tokens,
    and scores, go through PyTorch in 16 bits. The prompts of a batch, and draft tokens, share passes (passes.py), which
    round a little differently, so ties may fall to the other side; where passes do not fit the model or the GPU, or an
    option asks for more than they have, prompts come one after the other and `speculate` has no effect.
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
    ):
        """`dtype` "auto" is the checkpoint's, and bf16 where that is fp32. `version`: "persistent" or "graph".

        ValueError for a model that the kernels cannot hold, and for options of the CPU: threads, isa, math, pin,
        kv_dtype, processes.
        """
        if dtype == "auto":
            dtype = tensors[FIRST_MATRIX].dtype.replace("fp32", "bf16")
        unsupported = {"threads": threads, "isa": isa, "pin": pin or None}
        unsupported["processes"] = None if processes == 1 else processes
        unsupported["math"] = None if math in ("auto", "exact") else math
        unsupported["dtype"] = None if dtype in DTYPES else dtype
        unsupported["kv_dtype"] = None if kv_dtype == "auto" else kv_dtype
        for name, value in unsupported.items():
            if value is not None:
                raise ValueError(f"{name} = {value!r}: {USE_CPU}")
        self.dtype, self.math, self.kv_dtype, self.isa = dtype, "exact", dtype, CUDA
        if cache_bytes is not None:
            cache_bytes = in_range("cache_bytes", cache_bytes, int, 0, 2**63)
        self.gpu = SequenceDecoder(config, tensors, dtype, devices, version, cache_bytes=cache_bytes)
        self._tensors, self._devices = tensors, devices
        self._sharing: list[Decoding] = []  # of a request whose columns share passes
        self._prepare_joined()
        self._request = Request([])
        self._outputs: list[list[int]] = []
        self._running = self._cancelled = False
        self._reused = self._passes = 0
        self._before: list[int] = []  # new tokens of launches before this one

    refused_options = CPU_ONLY

    def check(self, request: Request) -> None:
        """ValueError for what only the CPU has."""
        for field in dataclasses.fields(Request):
            value = getattr(request, field.name)
            if field.name in CPU_ONLY and value not in (field.default, []):
                raise ValueError(f"{field.name} = {value!r}: {USE_CPU}")
        if len(request.stop_ids) > MOST_STOPS:
            raise ValueError(f"{len(request.stop_ids)} stop ids; the CUDA engine takes at most {MOST_STOPS}")

    def close(self) -> None:
        """End the request, if one runs, else give the memory back."""
        self.cancel()
        if not self._running:
            del self.gpu
            self.__dict__.pop("side_by_side", None)
        torch.cuda.empty_cache()

    @property
    def threads(self) -> int:
        geometry = self.gpu.geometry
        return geometry.devices * geometry.blocks * geometry.warps * 32

    @property
    def weight_bytes(self) -> int:
        return sum(memory.weight_bytes for memory in self.gpu.memories)

    @functools.cached_property
    def side_by_side(self) -> PassDecoder | None:
        """Made when it is first needed: it holds the weights once more, in tiles. None where it cannot run."""
        if self.gpu.version != "persistent":  # it, too, needs all blocks at once
            return None
        try:
            return PassDecoder(self.gpu.config, self._tensors, self.dtype, self._devices)
        except (ValueError, NotResident, torch.OutOfMemoryError) as error:
            warnings.warn(f"prompts do not share passes, drafts have no effect: {error}", stacklevel=2)
            return None

    def start(self, request: Request) -> None:
        self._request, self._outputs, self._cancelled, self._sharing = request, [], False, []
        self._reused = self._passes = 0
        self._scores: tuple[np.ndarray, ...] = tuple(np.empty(0, t) for t in (np.float32, np.int32, np.float32))
        try:
            if request.score_from:
                self._score(request)
            elif shares_passes(request) and self.side_by_side:
                self._sharing = decodings(request, self.gpu.config.max_position_embeddings)
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
        room = self.gpu.config.max_position_embeddings - len(self._request.prompts[len(self._outputs) - 1]) + 1
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
        if not self._cancelled and not all(s.finished for s in self._sharing):
            self.side_by_side.advance(self._sharing)
        self._outputs, self._passes = [s.tokens for s in self._sharing], self.side_by_side.passes
        self._running = not (self._cancelled or all(s.finished for s in self._sharing))

    def _finish(self, tokens: list[int]) -> None:
        """A launch has ended: score its tokens, start the next one."""
        r = self._request
        self._count(len(tokens))
        if r.logprobs is not None and len(self._outputs) == 1:
            self._keep(scores_of(self.gpu.new_logits(len(tokens)), tokens, r.logprobs))
        if self._cancelled:
            return
        if tokens and tokens[-1] not in r.stop_ids and len(self._outputs[-1]) < self._most_new():
            self._launch()
        elif len(self._outputs) < len(r.prompts):
            self._start_next()

    def _keep(self, scores: tuple[torch.Tensor, ...]) -> None:
        pairs = zip(self._scores, scores, strict=True)
        self._scores = tuple(np.concatenate((old, new.numpy())) for old, new in pairs)

    def _count(self, made: int) -> None:
        read = len(self._request.prompts[len(self._outputs) - 1]) + len(self._before)
        self._reused += 0 if self._before else self.gpu.reused
        prefilled = read - self.gpu.read_tokens - self.gpu.reused
        self._passes += -(-prefilled // CHUNK_TOKENS) + self.gpu.read_tokens + max(made - 1, 0)

    def cancel(self) -> None:
        self._cancelled = True
        if self._running:
            self.gpu.cancel()

    def outputs(self) -> list[list[int]]:
        return self._outputs

    def statistics(self) -> dict[str, int]:
        drafts = {f"{kind}_tokens": sum(getattr(s, kind) for s in self._sharing) for kind in ("proposed", "accepted")}
        return {"reused_tokens": self._reused, "passes": self._passes, **drafts}

    def _score(self, r: Request) -> None:
        """Scores of ids[score_from:], or with `keep_logits` the logits after every id; all before this returns."""
        ids, first = list(r.prompts[0]), r.score_from
        start, read = (0, ids) if r.keep_logits else (first - 1, ids[:-1])
        blocks = (block for h in self.gpu.read(read, start, r.reuse_prefix) for block in logits_of(self.gpu.model, h))
        if r.keep_logits:
            self._logits = torch.cat([block.cpu() for block in blocks]).numpy()
        else:
            targets = iter(ids[first:])
            for block in blocks:
                self._keep(scores_of(block, list(itertools.islice(targets, len(block))), r.logprobs or 0))
        self._reused, self._passes = self.gpu.reused, -(-(len(read) - self.gpu.reused) // CHUNK_TOKENS)

    def scores(self, from_index: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        logprobs, top_ids, top_logprobs = self._scores
        top, last = self._request.logprobs or 0, from_index + count
        flat = slice(top * from_index, top * last)
        return logprobs[from_index:last], top_ids[flat], top_logprobs[flat]

    def logits(self) -> np.ndarray:
        return self._logits

    def partials(self) -> np.ndarray:
        raise ValueError(f"keep_partials: {USE_CPU}")


def scores_of(logits: torch.Tensor, targets: list[int], top: int) -> tuple[torch.Tensor, ...]:
    """Of logits (n, V): log p of the targets (n,), the `top` likeliest ids and their log p, flat; on the CPU."""
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(targets, device=logits.device)[:, None])[:, 0]
    # a stable sort puts the lowest of equally likely ids first, which topk does not promise
    likeliest = (
        logits.sort(dim=-1, descending=True, stable=True).indices[:, :top] if top else own[:, None][:, :0].long()
    )
    return own.cpu(), likeliest.flatten().int().cpu(), logprobs.gather(1, likeliest).flatten().cpu()
