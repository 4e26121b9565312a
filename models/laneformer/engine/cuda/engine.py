"""CudaEngine: what Engine offers, on GPUs.

Engine checks, streams and holds the lock; all it asks of the C++ decoder are a few methods (_core.pyi), which Requests
offers on a CudaDecoder: generation in the decode kernel, scores through the PyTorch model.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from ...config import LaneformerConfig
from ..cpu import _core
from ..device import CUDA
from ..engine import Engine
from ..folder import Tensor
from ..options import GenerationOptions
from .decoder import POLL_S, CudaDecoder
from .geometry import MOST_STOPS
from .memory import TORCH_TYPES
from .params import Sampling
from .prefill import CHUNK_TOKENS, logits_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

USE_CPU = "the CUDA engine does not have this option; use device = 'cpu'"
NOT_HERE = (
    "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "min_new_tokens", "logprobs",
)  # fmt: skip
LEAST_TEMPERATURE = 1e-6  # colder draws are greedy, but for logits that are equal


class CudaEngine(Engine):
    """Decodes one request at a time on one or more GPUs that share the lanes; Engine's methods.

    The kernels compute as math="exact" does, but for keys and values in 16 bits; prompts of more than a few new tokens,
    and scores, go through PyTorch in 16 bits. Draws are made with Gumbel noise: the same seed gives the same tokens
    again, and others than on the CPU. `speculate` is accepted and does nothing: the tokens are the same without.
    """

    def __init__(
        self,
        config: LaneformerConfig,
        tensors: Mapping[str, Tensor],
        *,
        dtype: str = "auto",
        devices: Sequence[str] = ("cuda:0",),
        version: str = "persistent",
        eos_ids: Sequence[int] = (),
        tokenizer: Tokenizer | None = None,
        threads: int | None = None,
        isa: str | None = None,
        math: str = "exact",
        pin: bool = False,
    ):
        """`dtype` "auto" is the checkpoint's, and bf16 where that is fp32. `version`: "persistent" or "graph".

        ValueError for a model that the kernels cannot hold, and for options of the CPU engine: threads, isa, math, pin.
        """
        if dtype == "auto":
            dtype = tensors["lm_head.weight"].dtype.replace("fp32", "bf16")
        refused = {"threads": threads, "isa": isa, "pin": pin or None, "math": None if math == "exact" else math}
        refused["dtype"] = None if dtype in TORCH_TYPES else dtype
        for name, value in refused.items():
            if value is not None:
                raise ValueError(f"{name} = {value!r}: {USE_CPU}")
        self.config, self.dtype, self.math = config, dtype, math
        self.tokenizer, self.eos_ids = tokenizer, tuple(eos_ids)
        self._request_lock = threading.Lock()
        self._decoder = cast(_core.Decoder, Requests(CudaDecoder(config, tensors, dtype, devices, version)))

    @property
    def gpu(self) -> CudaDecoder:
        """The decoder itself, for measurements."""
        return cast(Requests, self._open()).gpu

    def _arguments(self, prompts: list[list[int]], options: GenerationOptions, probe_every: int = 0) -> dict[str, Any]:
        plain = GenerationOptions()
        for name in NOT_HERE:
            if (value := getattr(options, name)) != getattr(plain, name):
                raise ValueError(f"{name} = {value!r}: {USE_CPU}")
        request = super()._arguments(prompts, options, probe_every)
        if len(request["stop_ids"]) > MOST_STOPS:
            raise ValueError(f"{len(request['stop_ids'])} stop ids; the CUDA engine takes at most {MOST_STOPS}")
        return request

    def close(self) -> None:
        """End the request, if one runs, and give the memory back when its stream is closed; safe to call twice."""
        super().close()
        torch.cuda.empty_cache()


class Requests:
    """What Engine asks of a decoder (_core.pyi), on a CudaDecoder: the prompts of a batch one after the other."""

    def __init__(self, gpu: CudaDecoder):
        self.gpu = gpu
        self._request: dict[str, Any] = {}
        self._outputs: list[list[int]] = []
        self._running = self._cancelled = False
        self._reused = self._passes = 0

    @property
    def threads(self) -> int:
        geometry = self.gpu.geometry
        return geometry.devices * geometry.blocks * geometry.warps * 32

    @property
    def isa(self) -> str:
        return CUDA

    @property
    def weight_bytes(self) -> int:
        return sum(memory.weight_bytes for memory in self.gpu.memories)

    def start(self, request: dict[str, Any]) -> None:
        self._request, self._outputs, self._cancelled = request, [], False
        self._reused = self._passes = 0
        self._start_next()

    def _start_next(self) -> None:
        r = self._request
        ids = r["prompts"][len(self._outputs)]
        room = self.gpu.config.max_position_embeddings - len(ids) + 1
        self.gpu.start(ids, min(r["max_new_tokens"], room), r["stop_ids"], sampling_of(r), r["reuse_prefix"])
        self._outputs.append([])
        self._running = True

    def poll(self, from_index: int, timeout_s: float, until_done: bool) -> tuple[list[int], bool]:
        """The first prompt's tokens from an index on, when there are any, all have ended, or the time is over."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._look()
            tokens = self._outputs[0][from_index:] if self._outputs else []
            if not self._running or (tokens and not until_done) or time.monotonic() > deadline:
                return tokens, not self._running
            time.sleep(POLL_S)

    def _look(self) -> None:
        """What has happened since: new tokens, the end, the next prompt."""
        if not self._running:
            return
        try:
            self._outputs[-1], finished = self.gpu.poll()
        except Exception:  # a hang, or the driver's: there is nothing to wait for any more
            self._running = False
            raise
        if finished:
            self._running = False
            self._count()
            if not self._cancelled and len(self._outputs) < len(self._request["prompts"]):
                self._start_next()

    def _count(self) -> None:
        prompt, made = self._request["prompts"][len(self._outputs) - 1], len(self._outputs[-1])
        self._reused += self.gpu.reused
        prefilled = len(prompt) - self.gpu.read_tokens - self.gpu.reused
        self._passes += -(-prefilled // CHUNK_TOKENS) + self.gpu.read_tokens + max(made - 1, 0)

    def cancel(self) -> None:
        self._cancelled = True
        self.gpu.cancel()

    def outputs(self) -> list[list[int]]:
        return self._outputs

    def statistics(self) -> dict[str, int]:
        return {"reused": self._reused, "passes": self._passes, "proposed": 0, "accepted": 0}

    def start_scoring(
        self, ids: list[int], score_from: int, top_logprobs: int, reuse_prefix: bool, keep_logits: bool
    ) -> None:
        """Scores of ids[score_from:], or with `keep_logits` the logits after every id; all before this returns."""
        start, read = (0, ids) if keep_logits else (score_from - 1, ids[:-1])
        blocks = (block for h in self.gpu.read(read, start, reuse_prefix) for block in logits_of(self.gpu.model, h))
        if keep_logits:
            self._logits = torch.cat([block.cpu() for block in blocks]).numpy()
        else:
            targets = iter(ids[score_from:])
            parts = [scores_of(b, list(itertools.islice(targets, len(b))), top_logprobs) for b in blocks]
            nothing = torch.empty(0), torch.empty(0, dtype=torch.int32), torch.empty(0)
            self._scores = tuple(torch.cat(part).numpy() for part in zip(nothing, *parts, strict=True))
        self._reused, self._passes = self.gpu.reused, -(-(len(read) - self.gpu.reused) // CHUNK_TOKENS)

    def scores(self, from_index: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        logprobs, top_ids, top_logprobs = self._scores
        assert (from_index, count) == (0, len(logprobs)), "scores are read whole"
        return logprobs, top_ids, top_logprobs

    def logits(self) -> np.ndarray:
        return self._logits


def sampling_of(request: dict[str, Any]) -> Sampling:
    """How the kernels choose a token; with one candidate left there is nothing to draw."""
    temperature = request["temperature"]
    greedy = temperature < LEAST_TEMPERATURE or request["top_k"] == 1 or request["top_p"] == 0
    inverse = 0.0 if greedy else 1 / temperature
    return Sampling(request["seed"], inverse, request["top_p"], request["min_p"], request["top_k"])


def scores_of(logits: torch.Tensor, targets: list[int], top: int) -> tuple[torch.Tensor, ...]:
    """Of logits (n, V): log p of the targets (n,), the `top` likeliest ids and their log p, flat; on the CPU."""
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(targets, device=logits.device)[:, None])[:, 0]
    # a stable sort puts the lowest of equally likely ids first, which topk does not promise
    likeliest = (
        logits.sort(dim=-1, descending=True, stable=True).indices[:, :top] if top else own[:, None][:, :0].long()
    )
    return own.cpu(), likeliest.flatten().int().cpu(), logprobs.gather(1, likeliest).flatten().cpu()
