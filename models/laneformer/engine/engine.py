"""Engine: the facade of inference. It makes requests and holds the decoder that they join.

From `generate` to the decode loop: Engine._run -> Decoder.join -> the schedule, whose passes run in C++
(`CpuExecutor::serve`) or on GPUs (`CudaExecutor.run`); what they yield comes back through Decoder.collect.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from ..config import MODULES, LaneformerConfig
from ..supports import refuse_other_layers
from ..tensors import AS_IN_FILE, MATRIX_DTYPES, Tensor, dtype_name
from .batch import Batch
from .cpu.decoder import RandomTensors
from .cpu.packed import PackedWeights
from .cpu.processes import cpu_decoder
from .decoder import (
    CUDA,
    Collected,
    Decoder,
    GeneratedToken,
    Generation,
    PromptLogprobs,
    Request,
    Scores,
    Statistics,
)
from .device import cuda_devices
from .draft_model import DraftHead, DraftModel, draft_with
from .folder import read_checkpoint, read_tensors, with_context
from .options import without_logprobs
from .requests import Requests
from .running import ENGINES, Running, Stream
from .text import StopStrings, TextStream, text_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

T = TypeVar("T")


class Engine:
    """Decodes one request at a time. A context manager; `close()` frees the weights.

    Args on every device:
        device: "cpu", "cuda", "cuda:0,cuda:1" for several GPUs, or "auto" (the CPU; see device.py).
        dtype: of the matrices; embedding and norms keep theirs. "auto" keeps the checkpoint's; "int8" has a scale
            a row; "int4" a scale and 16 levels for every 32 inputs of a row (first and last layer and the head are
            int8) and implies math="int8"; "gguf" keeps each matrix in the blocks of its GGUF file, which "auto" means
            for a quantised one, and implies math="int8", too. GPUs have the 16-bit types and "int8".
        cache_bytes: memory for keys and values of earlier requests, so that a new prompt reuses the prefix it
            shares with one of them. Default: a quarter of the free memory (schedule/prefix.h).

    Args on the CPU:
        cache_dir: a directory that keeps prefixes of earlier requests for the next start (cpu/saved.py);
            `close` saves the last ones. cache_dir_bytes: of all its files; default: 10 GB. One process alone.
        threads: default all physical cores, or what the container's CPU quota allows.
        pin: bind each thread to a CPU of its own, one per core first. Default on machines with several memory
            nodes; meant for an engine that has the machine to itself.
        math: "exact" widens weights to fp32 and keeps fp32 activations; with kv_dtype="fp32", greedy output equals
            the float32 model's. "bf16" rounds matrix inputs to bf16 (vdpbf16ps where the CPU has it) and needs bf16
            weights. "int8" rounds every 32 matrix inputs to int8 and needs int8, int4 or gguf weights. "auto", the
            default, is "exact" wherever the weights permit it, and "int8" for int4 and gguf. "fast", which the
            `laneformer` commands take, is "int8" for int8 weights, too, and "bf16" for bf16 ones where the CPU
            multiplies those.
        kv_dtype: of cached keys and values. "auto": "fp32" for fp32 weights, else "fp16", which raises ValueError
            for values beyond 65,504; "bf16" holds them. "int8": integers with a scale for each head and position,
            nearly half of 16 bits (docs/long-context.md has what it costs).
        processes: share the lanes over that many processes, `threads` threads each (default: an equal part of the
            cores). Losing one raises RuntimeError and closes the engine.
        isa: "auto", "amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2" or "portable"; default from
            the environment variable LANEFORMER_ISA. Results are bit-identical alone, batched or drafted, except on
            "amx" with bf16 weights, where passes of four positions and more differ by about 1e-6.

    Args on GPUs:
        version: "passes" (that requests share) or "graph" (one request at a time). Both compute as
            math="exact", with keys and values in 16 bits. Long prompts and scores go through PyTorch.
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
        """Pack tensors named and shaped as `config.tensor_shapes` says; ValueError for
        bad options and values.

        tokenizer_config (with the chat template) and sampling_defaults (how the model's makers sample it, as
        options) are only kept: `generate` is greedy unless it is told otherwise.
        """
        self.config = config
        self.tokenizer, self.tokenizer_config = tokenizer, dict(tokenizer_config)
        self.sampling_defaults = dict(sampling_defaults)
        self.eos_ids = tuple(eos_ids)
        self.request_lock = (
            threading.Lock()
        )  # held while weights load, and from a request's start until it is read
        self._running = Running([])  # the last one
        self._batch: Batch | None = None  # the last one
        self._decoder: Decoder | None = None
        self._process = os.getpid()
        self.draft_model: DraftModel | None = None
        dtype = dtype_name(dtype)
        if dtype not in ("auto", *MATRIX_DTYPES):
            raise ValueError(f"dtype = {dtype!r} is unknown; choose from {('auto', *MATRIX_DTYPES)}")
        ENGINES.add(self)
        with self.request_lock:
            decoder: Decoder
            if devices := cuda_devices(device):
                refuse_other_layers(config, "the CUDA engine", "use device = 'cpu'")
                from .cuda.decoder import CudaDecoder  # imports torch

                if options.pop("cache_dir", None) is not None:
                    raise ValueError(
                        "cache_dir keeps the CPU engine's prefixes; use device = 'cpu', or no cache_dir"
                    )
                options.pop("cache_dir_bytes", None)
                only = {"math": "exact"} if options.get("math") == "fast" else {}
                decoder = CudaDecoder(config, tensors, dtype, devices, **options | only)
            else:
                decoder = cpu_decoder(config, tensors, dtype, **options)
        self._decoder, self._requests = decoder, Requests(config, self.eos_ids, decoder)
        self.draft_head = DraftHead.of(decoder, config)
        self.dtype, self.math, self.kv_dtype = decoder.dtype, decoder.math, decoder.kv_dtype

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: str = "auto",
        dtype: str = "auto",
        threads: int | None = None,
        cache: bool = True,
        context_tokens: int | None = None,
        lanes: int | None = None,
        draft: str | Path | None = None,
        **options: Any,
    ) -> Engine:
        """Load a folder of this project or of the Llama family, or a GGUF file; ValueError says what
        is wrong with it.

        dtype "auto" of a quantised GGUF file is "gguf", its blocks as they are, and "int8" on GPUs.

        `cache` keeps the CPU's packed weights in `path`/.packed (or the user's cache directory) for the next
        start: the four combinations of threads and dtype that were used last. `context_tokens` replaces the
        config's max_position_embeddings. `lanes` of a Llama-family model: by default as many as share threads
        evenly (GPUs: up to 8) and divide its heads and MLP rows. `draft`: a small model with the same vocabulary,
        whose drafts are verified where that is faster, in place of those of the model's own head; the output stays
        the same. Other `options` as in Engine.
        """
        gpus = len(cuda_devices(device))
        checkpoint = read_checkpoint(
            Path(path), lanes, threads and threads * options.get("processes", 1), dtype, gpus
        )
        config = checkpoint.config
        if context_tokens is not None:
            config = with_context(config, context_tokens, options.get("kv_dtype", "auto"))
        if not gpus:
            options["source"] = functools.partial(read_tensors, Path(path).resolve(), config.num_lanes, dtype)
        if cache and not gpus:
            options["packed"] = PackedWeights(Path(path), checkpoint.files)
        for name in ("eos_ids", "tokenizer", "tokenizer_config", "sampling_defaults"):
            options[name] = getattr(checkpoint, name)
        dtype = checkpoint.dtype if dtype == "auto" else dtype
        engine = cls(config, checkpoint.tensors, device=device, dtype=dtype, threads=threads, **options)
        if draft is not None:
            try:
                engine.draft_model = draft_with(engine._open(), config, engine.tokenizer, Path(draft), cache)
                engine.draft_head = None
            except BaseException:
                engine.close()
                raise
        return engine

    @classmethod
    def random(
        cls,
        flavor: str | LaneformerConfig,
        dtype: str = "bf16",
        seed: int = 0,
        device: str = "auto",
        **options: Any,
    ) -> Engine:
        """Random weights of a flavor's shapes, for benchmarks without a checkpoint; `options` as in Engine.

        int8 and int4 are made of the bf16 weights of the same seed.
        """
        config = LaneformerConfig.from_flavor(flavor) if isinstance(flavor, str) else flavor
        dtype = dtype_name(dtype)
        drawn = tuple(name for name in MATRIX_DTYPES if name != AS_IN_FILE)
        if dtype not in drawn:
            raise ValueError(f"dtype = {dtype!r} is unknown; random weights are one of {drawn}")
        tensors = RandomTensors(config, "bf16" if dtype in ("int8", "int4") else dtype, seed)
        return cls(config, tensors, device=device, dtype=dtype, **options)

    def generate(self, prompt_ids: Sequence[int], **options: Any) -> list[int]:
        """New token ids after the prompt; options are those of GenerationOptions."""
        request = self._requests.generation(prompt_ids, without_logprobs(options), quiet=True)
        return self._finished([request])[0].tokens

    def stream(self, prompt_ids: Sequence[int], **options: Any) -> Stream[int]:
        """The tokens of `generate`, each as soon as it is known; closing the stream cancels the request."""
        request = self._requests.generation(prompt_ids, without_logprobs(options))
        return self._stream(request, lambda ids, scores: ids)

    def generate_batch(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
        """`generate` for 1 to 8 prompts that share each pass over the weights.

        Each as if it were alone, with a seed of its own (option `seed` of GenerationOptions).
        """
        requests = self._requests.batch(prompts, without_logprobs(options))
        return [news.tokens for news in self._finished(requests)]

    def generate_detailed(self, prompt_ids: Sequence[int], **options: Any) -> Generation:
        """`generate` with log-probabilities (option `logprobs`), the reason of the end, and statistics."""
        request = self._requests.generation(prompt_ids, options, quiet=True)
        news = self._finished([request], even_cancelled=True)[0]
        reason = "stop" if {*news.tokens[-1:]} & {*request.stop_ids} else "length"
        return Generation(
            GeneratedToken.described(news.tokens, news.scores),
            "cancelled" if self._running.cancelled else reason,
            len(request.prompt),
            Statistics(**news.whole.statistics),
        )

    def stream_detailed(self, prompt_ids: Sequence[int], **options: Any) -> Stream[GeneratedToken]:
        """The tokens of `generate_detailed`, each as soon as it is known."""
        return self._stream(self._requests.generation(prompt_ids, options), GeneratedToken.described)

    def generate_text(
        self, prompt: str | Sequence[int], *, stop: str | Sequence[str] = (), **options: Any
    ) -> str:
        """Text after the prompt (text or ids), without the stop string that ended it; needs a tokenizer."""
        return "".join(self.stream_text(prompt, stop=stop, **options))

    def stream_text(
        self, prompt: str | Sequence[int], *, stop: str | Sequence[str] = (), **options: Any
    ) -> Stream[str]:
        """The text of `generate_text` in pieces: whole characters, and never a part of a stop string."""
        if self.tokenizer is None:
            raise ValueError(
                "text needs a tokenizer, but the model folder of this engine holds no tokenizer.json"
            )
        ids = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
        request = self._requests.generation(ids, without_logprobs(options), "prompt")
        running = Running([request])
        tokens = self._tokens(running, lambda ids, scores: ids)
        text = TextStream(self.tokenizer, request.prompt)
        return Stream(text_of(tokens, text, StopStrings(stop)), running)

    @overload
    def logprobs(self, ids: Sequence[int], *, start: int = 1, reuse_prefix: bool = True) -> np.ndarray: ...
    @overload
    def logprobs(
        self, ids: Sequence[int], *, top: int, start: int = 1, reuse_prefix: bool = True
    ) -> PromptLogprobs: ...
    def logprobs(
        self, ids: Sequence[int], *, top: int | None = None, start: int = 1, reuse_prefix: bool = True
    ) -> np.ndarray | PromptLogprobs:
        """log p(ids[i] | ids[:i]) for i >= start, float32 (len(ids) - start,); with `top`
        also the likeliest ids.

        The last id is only predicted, never read. A later `start` saves the head's work, and that of the
        positions before it that are still in the KV cache, as when many continuations follow one context.
        """
        request = self._requests.scoring(ids, start, 0 if top is None else top, reuse_prefix)
        scores = self._finished([request])[0].scores
        assert scores is not None
        return scores[0] if top is None else PromptLogprobs.of(request.prompt[start:], scores, top)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """The logits after every position, float32 (len(ids), V)."""
        whole = self._finished([self._requests.logits(ids)])[0].whole
        assert whole.logits is not None
        return whole.logits.reshape(-1, self.config.vocab_size)

    def _partials(self, ids: Sequence[int], positions: Sequence[int]) -> np.ndarray:
        """Outputs of each module at some positions (ascending), for checks: float32 (positions,
        layers, 2, L, D).
        """
        whole = self._finished([self._requests.logits(ids, positions)])[0].whole
        assert whole.partials is not None
        c = self.config
        return whole.partials.reshape(
            len(positions), c.num_hidden_layers, len(MODULES), c.num_lanes, c.hidden_size
        )

    def batch(self) -> Batch:
        """For requests that run side by side, as a server's do. Until it is closed, the
        engine takes no others.

        RuntimeError while another request has not ended.
        """
        decoder = self._open()
        self._acquire()
        self._batch = Batch(decoder, self._requests, self.request_lock.release)
        return self._batch

    @property
    def statistics(self) -> Statistics:
        """Of the last request: reused positions, passes, draft tokens."""
        return Statistics(**self._open().statistics())

    @property
    def threads(self) -> int:
        """Threads that work; more than lanes share them."""
        return self._open().threads

    @property
    def isa(self) -> str:
        return self._open().isa

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights read for every decoded token."""
        return self._open().weight_bytes

    @property
    def kv_cache(self) -> dict[str, int]:
        """Bytes of keys and values held now, those of earlier requests among them, and the most that are kept; empty
        on GPUs, which count sequences.
        """
        decoder: Any = self._open()
        return {} if self.isa == CUDA else {"kv_bytes": decoder.kv_bytes, "cache_bytes": decoder.cache_bytes}

    @property
    def saved_prefixes(self) -> dict[str, int]:
        """Of the files in `cache_dir`: number, bytes, limit, and their use; empty without one."""
        prefixes = getattr(self._open(), "prefixes", None)
        return {} if prefixes is None else prefixes.counts

    def load_prefix(self, prompt_ids: Sequence[int]) -> None:
        """Load what `cache_dir` has of this prompt now; else that is done when its request joins."""
        if (prefixes := getattr(self._open(), "prefixes", None)) is not None:
            prefixes.load(prompt_ids, len(prompt_ids) - 1)

    @property
    def draft_kv_bytes(self) -> int:
        """Bytes of keys and values that a draft model holds now."""
        return self._open().draft_kv_bytes if self.draft_model else 0  # type: ignore[attr-defined]

    def cancel(self) -> None:
        """End the running request, from any thread; nothing where none runs.

        Whoever waits for it gets Cancelled, but for `generate_detailed`, whose
        finish_reason is then "cancelled".
        """
        self._running.cancel()

    def close(self) -> None:
        """Cancel the running request, stop the threads and free the weights; from any thread,
        safe to call twice.
        """
        decoder, self._decoder = self._decoder, None
        if self._batch is not None:
            self._batch.close()
        if decoder is not None:
            self.cancel()
            decoder.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self) -> Decoder:
        if self._decoder is None:
            raise ValueError("this engine is closed")
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this engine belongs to process {self._process}: a forked child has none of its threads; make an "
                "engine in the child, or start processes with the method 'spawn'"
            )
        return self._decoder

    def _acquire(self) -> None:
        if not self.request_lock.acquire(blocking=False):
            raise RuntimeError("the engine is busy with another request; finish or close its stream first")

    def _run(self, running: Running) -> Generator[tuple[int, Collected]]:
        """News of requests that have the decoder to themselves, until they have ended.

        RuntimeError while another request has not ended.
        """
        decoder = self._open()
        self._acquire()
        try:
            self._running = running
            yield from running.news(decoder)
        finally:
            self.request_lock.release()

    def _finished(self, requests: Sequence[Request], even_cancelled: bool = False) -> list[Collected]:
        """All that comes of quiet requests, or of scoring ones.

        Cancelled where they were cancelled, or with `even_cancelled` what there was by then.
        """
        running, found = Running(requests), dict[int, Collected]()
        with contextlib.closing(self._run(running)) as every:
            found.update(every)
        if not even_cancelled:
            running.expect_finished()
        return [found[number] for number in range(len(requests))]

    def _stream(self, request: Request, read: Callable[[list[int], Scores | None], list[T]]) -> Stream[T]:
        running = Running([request])
        return Stream(self._tokens(running, read), running)

    def _tokens(
        self, running: Running, read: Callable[[list[int], Scores | None], list[T]]
    ) -> Generator[T, None, None]:
        """What `read` makes of new token ids and their scores, one by one."""
        # started here and not by `stream`: an iterator that is never advanced must not leave
        # a request running
        with contextlib.closing(self._run(running)) as every:
            for _, news in every:
                yield from read(news.tokens, news.scores)
        running.expect_finished()
