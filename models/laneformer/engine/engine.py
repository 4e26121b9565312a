"""Engine: load a model and generate tokens, text or log-probabilities with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ..config import LaneformerConfig
from ..joins import MODULES
from ..tensors import Tensor, dtype_name
from .batch import Batch
from .decoder import (
    CUDA,
    Decoder,
    DraftHead,
    DraftModel,
    GeneratedToken,
    Generation,
    PromptLogprobs,
    Request,
    Statistics,
    finish_reason,
)
from .loading import load_decoder, random_tensors, read_model
from .options import without_logprobs
from .requests import Requests
from .running import Call, ExclusiveDecoder, Stream
from .text import StopStrings, TextStream, text_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Engine:
    """Decode one request at a time; a context manager, whose `close()` frees the weights.

    device: "cpu", "cuda", "cuda:0,cuda:1" for several GPUs, or "auto" (the CPU; see device.py).
    dtype: of the matrices; embedding and norms keep theirs. "auto" keeps the checkpoint's; "int8" has a scale per
        row; "int4" a scale and 16 levels for every 32 inputs of a row (first and last layer and the head are int8);
        "gguf" keeps the blocks of the GGUF file. The last two imply math="int8". GPUs: 16-bit types, "int8".
    options: those of `CpuDecoder` or `CudaDecoder`, such as threads or cache_bytes.
    """

    def __init__(
        self,
        config: LaneformerConfig,
        tensors: Mapping[str, Tensor],
        *,
        device: str = "auto",
        dtype: str = "auto",
        eos_ids: Sequence[int] = (),
        tokenizer: Tokenizer | None = None,
        tokenizer_config: Mapping[str, Any] = MappingProxyType({}),
        sampling_defaults: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ):
        """Pack tensors named and shaped as in `config.tensor_shapes`; ValueError for bad options and values."""
        self.config, self.eos_ids = config, tuple(eos_ids)
        # callers may read these; `generate` is greedy whatever sampling the model recommends
        self.tokenizer, self.tokenizer_config = tokenizer, dict(tokenizer_config)
        self.sampling_defaults = dict(sampling_defaults)
        self._requests = Requests(config, self.eos_ids)
        self._exclusive = ExclusiveDecoder()
        decoder = self._exclusive.load(
            lambda: load_decoder(config, tensors, device, dtype, **options)
        )
        self.dtype, self.math, self.kv_dtype = decoder.dtype, decoder.math, decoder.kv_dtype
        self.isa, self.threads = decoder.isa, decoder.threads
        self.weight_bytes = decoder.weight_bytes  # packed, read for every decoded token
        self.draft_model: DraftModel | None = getattr(decoder, "draft_model", None)
        self.draft_head: DraftHead | None = getattr(decoder, "draft_head", None)

    @classmethod
    def from_pretrained(
        cls, path: str | Path, device: str = "auto", dtype: str = "auto", **options: Any
    ) -> Engine:
        """Load a folder of this project or of the Llama family, or a GGUF file; ValueError for a bad one.

        dtype: "auto" of a quantised GGUF file is "gguf", or "int8" on GPUs.
        options: those of `read_model` (loading.py), such as lanes or draft, and of Engine.
        """
        return cls(**read_model(path, device, dtype, **options))

    @classmethod
    def random(
        cls,
        flavor: str | LaneformerConfig,
        dtype: str = "bf16",
        seed: int = 0,
        device: str = "auto",
        **options: Any,
    ) -> Engine:
        """Make random weights of a flavor's shapes, for benchmarks; `options` as in Engine."""
        config = LaneformerConfig.from_flavor(flavor) if isinstance(flavor, str) else flavor
        dtype = dtype_name(dtype)
        return cls(
            config, random_tensors(config, dtype, seed), device=device, dtype=dtype, **options
        )

    def generate(self, prompt_ids: Sequence[int], **options: Any) -> list[int]:
        """Return new token ids after the prompt; options are those of GenerationOptions."""
        request = self._requests.generation(prompt_ids, without_logprobs(options), quiet=True)
        return self._call(request).finish().tokens

    def stream(self, prompt_ids: Sequence[int], **options: Any) -> Stream[int]:
        """Yield the tokens of `generate` as they come; closing the stream cancels the request."""
        call = self._call(self._requests.generation(prompt_ids, without_logprobs(options)))
        return Stream(call.read(lambda ids, scores: ids), call)

    def generate_detailed(self, prompt_ids: Sequence[int], **options: Any) -> Generation:
        """Generate, with log-probabilities (option `logprobs`), finish reason and statistics."""
        request = self._requests.generation(prompt_ids, options, quiet=True)
        call = self._call(request)
        last = call.finish(even_cancelled=True)
        tokens = GeneratedToken.attach_scores(last.tokens, last.scores)
        reason = finish_reason(request, last.tokens, call.cancelled)
        return Generation(tokens, reason, len(request.prompt), Statistics(**last.whole.statistics))

    def stream_detailed(self, prompt_ids: Sequence[int], **options: Any) -> Stream[GeneratedToken]:
        """Yield the tokens of `generate_detailed` as they come."""
        call = self._call(self._requests.generation(prompt_ids, options))
        return Stream(call.read(GeneratedToken.attach_scores), call)

    def generate_text(
        self, prompt: str | Sequence[int], *, stop: str | Sequence[str] = (), **options: Any
    ) -> str:
        """Return text after the prompt (text or ids), without the stop string; needs a tokenizer."""
        return "".join(self.stream_text(prompt, stop=stop, **options))

    def stream_text(
        self, prompt: str | Sequence[int], *, stop: str | Sequence[str] = (), **options: Any
    ) -> Stream[str]:
        """Yield the text of `generate_text` in pieces: whole characters, no part of a stop string."""
        if self.tokenizer is None:
            raise ValueError(
                "text needs a tokenizer, but the model's folder holds no tokenizer.json"
            )
        ids = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
        request = self._requests.generation(ids, without_logprobs(options), "prompt")
        call, text = self._call(request), TextStream(self.tokenizer, request.prompt)
        return Stream(text_of(call.read(lambda ids, scores: ids), text, StopStrings(stop)), call)

    @overload
    def logprobs(
        self, ids: Sequence[int], *, start: int = 1, reuse_prefix: bool = True
    ) -> np.ndarray: ...
    @overload
    def logprobs(
        self, ids: Sequence[int], *, top: int, start: int = 1, reuse_prefix: bool = True
    ) -> PromptLogprobs: ...
    def logprobs(
        self,
        ids: Sequence[int],
        *,
        top: int | None = None,
        start: int = 1,
        reuse_prefix: bool = True,
    ) -> np.ndarray | PromptLogprobs:
        """Return log p(ids[i] | ids[:i]) for i >= start, float32 (len(ids) - start,); `top`: also likeliest ids."""
        # a later start saves the head's work, and that of cached positions before it, as when many
        # continuations follow one context
        request = self._requests.scoring(ids, start, 0 if top is None else top, reuse_prefix)
        scores = self._call(request).finish().scores
        assert scores is not None
        return scores[0] if top is None else PromptLogprobs.of(request.prompt[start:], scores, top)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Return the logits after every position, float32 (len(ids), V)."""
        logits = self._call(self._requests.logits(ids)).finish().whole.logits
        assert logits is not None
        return logits.reshape(-1, self.config.vocab_size)

    def _partials(self, ids: Sequence[int], positions: Sequence[int]) -> np.ndarray:
        # for checks: modules' outputs at ascending positions, float32 (positions, layers, 2, L, D)
        partials = self._call(self._requests.logits(ids, positions)).finish().whole.partials
        assert partials is not None
        c = self.config
        return partials.reshape(-1, c.num_hidden_layers, len(MODULES), c.num_lanes, c.hidden_size)

    def batch(self) -> Batch:
        """Begin a batch; RuntimeError while a request runs, and in other calls until the batch is closed."""
        return Batch(self._exclusive, self._requests)

    @property
    def statistics(self) -> Statistics:
        """Counts of the last request."""
        return Statistics(**self._open().statistics())

    @property
    def kv_cache(self) -> dict[str, int]:
        """Bytes of cached keys and values, and their limit; empty on GPUs, which count sequences."""
        decoder: Any = self._open()
        if self.isa == CUDA:
            return {}
        return {"kv_bytes": decoder.kv_bytes, "cache_bytes": decoder.cache_bytes}

    @property
    def draft_kv_bytes(self) -> int:
        return getattr(self._open(), "draft_kv_bytes", 0)

    @property
    def saved_prefixes(self) -> dict[str, int]:
        """Number, bytes, limit and hits of the files in `cache_dir`; empty without one."""
        prefixes = getattr(self._open(), "prefixes", None)
        return prefixes.counts if prefixes else {}

    def load_prefix(self, prompt_ids: Sequence[int]) -> None:
        """Load what `cache_dir` has of this prompt, for which its request would wait when it joins."""
        if prefixes := getattr(self._open(), "prefixes", None):
            prefixes.load(prompt_ids, len(prompt_ids) - 1)  # max_reusable (cpu/saved.py)

    def cancel(self) -> None:
        """End requests, from any thread: calls raise Cancelled, `generate_detailed` returns what there is."""
        self._exclusive.cancel()

    def close(self) -> None:
        """Cancel requests, stop the threads and free the weights; from any thread, safe to call twice."""
        self._exclusive.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _call(self, request: Request) -> Call:
        # from here: Call.finish (Call.read, for streams) -> Decoder.join -> the schedule, whose
        # passes run in C++ (`CpuExecutor::run_passes`) or on GPUs (`CudaExecutor.run`) ->
        # Decoder.collect
        return Call(self._exclusive, request)

    def _open(self) -> Decoder:
        return self._exclusive.get()
