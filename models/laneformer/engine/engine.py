"""Engine: the facade of inference. It validates options, streams text and holds a Decoder,
which does the rest.

From `generate` to the decode loop: Engine._start -> Decoder.start -> the loop itself (C++ `Decoder::serve`,
or the launch of the CUDA kernel).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from ..config import MODULES, LaneformerConfig
from ..tensors import MATRIX_DTYPES, Tensor, dtype_name
from .batch import Batch
from .cpu.decoder import RandomTensors
from .cpu.packed import PackedWeights
from .cpu.processes import cpu_decoder
from .decoder import Decoder, GeneratedToken, Generation, PromptLogprobs, Request, Statistics, described
from .device import cuda_devices
from .folder import read_checkpoint, read_tensors, with_context
from .options import MAX_LOGPROBS, GenerationOptions, checked_ids, in_range, without_logprobs
from .running import ENGINES, SIGNAL_POLL_S, Running, Stream, wait
from .text import StopStrings, TextStream, text_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_SEQUENCES = 8  # of one batch

T = TypeVar("T")


class Engine:
    """Decodes one request at a time. A context manager; `close()` frees the weights.

    Args on every device:
        device: "cpu", "cuda", "cuda:0,cuda:1" for several GPUs, or "auto" (the CPU; see device.py).
        dtype: of the matrices; embedding and norms keep theirs. "auto" keeps the checkpoint's; "int8" has a scale
            a row; "int4" a scale and 16 levels for every 32 inputs of a row (first and last layer and the head are
            int8) and implies math="int8". GPUs have the 16-bit types and "int8".
        cache_bytes: memory for keys and values of earlier requests, so that a new prompt reuses the prefix it
            shares with one of them. Default: a quarter of the free memory (csrc/kv_pool.h).

    Args on the CPU:
        threads: default all physical cores, or what the container's CPU quota allows.
        pin: bind each thread to a CPU of its own, one per core first. Default on machines with several memory
            nodes; meant for an engine that has the machine to itself.
        math: "exact" widens weights to fp32 and keeps fp32 activations; with kv_dtype="fp32", greedy output equals
            the float32 model's. "bf16" rounds matrix inputs to bf16 (vdpbf16ps where the CPU has it) and needs bf16
            weights. "int8" rounds every 32 matrix inputs to int8 and needs int8 or int4 weights. "auto": "int8" for
            int4 weights, else "exact".
        kv_dtype: of cached keys and values. "auto": "fp32" for fp32 weights, else "fp16", which raises ValueError
            for values beyond 65,504; "bf16" holds them.
        processes: share the lanes over that many processes, `threads` threads each (default: an equal part of the
            cores), one request at a time. Losing one raises RuntimeError and closes the engine.
        transport: between processes: "memory", "tcp", or "launched" (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
            of a launcher that started this program on every rank; ranks above 0 serve rank 0 until it exits).
        isa: "auto", "amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2" or "portable"; default from
            the environment variable LANEFORMER_ISA. Results are bit-identical alone, batched or drafted, except on
            "amx" with bf16 weights, where passes of four positions and more differ by about 1e-6.

    Args on GPUs:
        version: "persistent" (one kernel for the whole request) or "graph". Both compute as math="exact", with
            keys and values in 16 bits. Long prompts and scores go through PyTorch.
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
        self._running = Running()  # the last request
        self._batch: Batch | None = None  # the last one
        self._decoder: Decoder | None = None
        self._process = os.getpid()
        dtype = dtype_name(dtype)
        if dtype not in ("auto", *MATRIX_DTYPES):
            raise ValueError(f"dtype = {dtype!r} is unknown; choose from {('auto', *MATRIX_DTYPES)}")
        ENGINES.add(self)
        with self.request_lock:
            decoder: Decoder
            if devices := cuda_devices(device):
                from .cuda.decoder import CudaDecoder  # imports torch

                decoder = CudaDecoder(config, tensors, dtype, devices, **options)
            else:
                decoder = cpu_decoder(config, tensors, dtype, **options)
        self._decoder = decoder
        self.dtype, self.math, self.kv_dtype = decoder.dtype, decoder.math, decoder.kv_dtype
        self.refused_options = decoder.refused_options  # of a generation: this device does not have them

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
        **options: Any,
    ) -> Engine:
        """Load a folder of this project or of the Llama family, or a GGUF file; ValueError says what
        is wrong with it.

        dtype "auto" of a quantised GGUF file is the engine's own type of that width: int8 for 8 to 5
        bits, int4 for 4.

        `cache` keeps the CPU's packed weights in `path`/.packed (or the user's cache directory) for the next
        start: the four combinations of threads and dtype that were used last. `context_tokens` replaces the
        config's max_position_embeddings. `lanes` of a Llama-family model: by default as many as share threads
        evenly (GPUs: up to 8) and divide its heads and MLP rows. Other `options` as in Engine.
        """
        gpus = len(cuda_devices(device))
        checkpoint = read_checkpoint(
            Path(path), lanes, threads and threads * options.get("processes", 1), dtype, gpus
        )
        config = (
            checkpoint.config if context_tokens is None else with_context(checkpoint.config, context_tokens)
        )
        if not gpus:
            options["source"] = functools.partial(read_tensors, Path(path).resolve(), config.num_lanes, dtype)
        if cache and not gpus:
            options["packed"] = PackedWeights(Path(path), checkpoint.files)
        for name in ("eos_ids", "tokenizer", "tokenizer_config", "sampling_defaults"):
            options[name] = getattr(checkpoint, name)
        dtype = checkpoint.dtype if dtype == "auto" else dtype
        return cls(config, checkpoint.tensors, device=device, dtype=dtype, threads=threads, **options)

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
        if dtype not in MATRIX_DTYPES:
            raise ValueError(f"dtype = {dtype!r} is unknown; random weights are one of {MATRIX_DTYPES}")
        tensors = RandomTensors(config, "bf16" if dtype in ("int8", "int4") else dtype, seed)
        return cls(config, tensors, device=device, dtype=dtype, **options)

    def generate(self, prompt_ids: Sequence[int], **options: Any) -> list[int]:
        """New token ids after the prompt; options are those of GenerationOptions."""
        request = self._request([self._prompt(prompt_ids, "prompt_ids")], without_logprobs(options))
        return self._result(self._start(request), lambda d: d.outputs())[0]

    def stream(self, prompt_ids: Sequence[int], **options: Any) -> Stream[int]:
        """The tokens of `generate`, each as soon as it is known; closing the stream cancels the request."""
        request = self._request([self._prompt(prompt_ids, "prompt_ids")], without_logprobs(options))
        running = Running()
        return Stream(self._tokens(request, running, lambda decoder, ids, first: ids), running)

    def generate_batch(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
        """`generate` for 1 to 8 prompts that share each pass over the weights.

        Each as if it were alone, with a seed of its own (option `seed` of GenerationOptions).
        """
        given: Any = prompts.tolist() if hasattr(prompts, "tolist") else prompts  # arrays and tensors
        if isinstance(given, str) or not hasattr(given, "__len__") or not 1 <= len(given) <= MAX_SEQUENCES:
            raise ValueError(
                f"prompts must be a list of 1 to {MAX_SEQUENCES} prompts, each a list of token ids"
            )
        checked = [self._prompt(prompt, f"prompts[{i}]") for i, prompt in enumerate(given)]
        request = self._request(checked, without_logprobs(options))
        return self._result(self._start(request), lambda d: d.outputs())

    def generate_detailed(self, prompt_ids: Sequence[int], **options: Any) -> Generation:
        """`generate` with log-probabilities (option `logprobs`), the reason of the end, and statistics."""
        prompt = self._prompt(prompt_ids, "prompt_ids")
        request = self._request([prompt], GenerationOptions.from_kwargs(options))

        def read(decoder: Decoder) -> Generation:
            ids = decoder.outputs()[0]
            ended = "stop" if ids and ids[-1] in request.stop_ids else "length"
            reason = "cancelled" if self._running.cancelled else ended
            tokens = described(decoder, ids, 0, request)
            return Generation(tokens, reason, len(prompt), Statistics(**decoder.statistics()))

        return self._result(self._start(request), read, even_cancelled=True)

    def stream_detailed(self, prompt_ids: Sequence[int], **options: Any) -> Stream[GeneratedToken]:
        """The tokens of `generate_detailed`, each as soon as it is known."""
        prompt = self._prompt(prompt_ids, "prompt_ids")
        request = self._request([prompt], GenerationOptions.from_kwargs(options))
        running = Running()
        tokens = self._tokens(request, running, lambda d, ids, first: described(d, ids, first, request))
        return Stream(tokens, running)

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
        ids = self._prompt(self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt, "prompt")
        request = self._request([ids], without_logprobs(options))
        running = Running()
        tokens = self._tokens(request, running, lambda decoder, ids, first: ids)
        return Stream(text_of(tokens, TextStream(self.tokenizer, ids), StopStrings(stop)), running)

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
        request = self._scoring(ids, start, 0 if top is None else top, reuse_prefix)

        def read(decoder: Decoder) -> np.ndarray | PromptLogprobs:
            scores = decoder.scores(0, len(request.prompts[0]) - start)
            return scores[0] if top is None else PromptLogprobs.of(request.prompts[0][start:], scores, top)

        return self._result(self._start(request), read)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """The logits after every position, float32 (len(ids), V)."""
        request = Request(
            [self._prompt(ids, "ids")], score_from=1, logprobs=0, reuse_prefix=False, keep_logits=True
        )
        return self._result(self._start(request), lambda d: d.logits()).reshape(-1, self.config.vocab_size)

    def _partials(self, ids: Sequence[int], positions: Sequence[int]) -> np.ndarray:
        """Outputs of each module at some positions (ascending), for checks: float32 (positions,
        layers, 2, L, D).
        """
        checked = self._prompt(ids, "ids")
        request = Request(
            [checked], score_from=len(checked), logprobs=0, reuse_prefix=False, keep_logits=True,
            keep_partials=list(positions),
        )  # fmt: skip
        c = self.config
        shape = len(positions), c.num_hidden_layers, len(MODULES), c.num_lanes, c.hidden_size
        return self._result(self._start(request), lambda d: d.partials()).reshape(shape)

    def batch(self) -> Batch:
        """For requests that run side by side, as a server's do. Until it is closed, the
        engine takes no others.

        RuntimeError while another request has not ended.
        """
        decoder = self._open()
        self._acquire()
        self._batch = Batch(decoder, self._joining, self._scoring, self.request_lock.release)
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

    def _prompt(self, ids: Sequence[int], what: str, longest: int | None = None) -> list[int]:
        checked = checked_ids(ids, self.config.vocab_size, what)
        context = longest or self.config.max_position_embeddings
        if not checked:
            raise ValueError(f"{what} is empty; give at least one token (such as the begin-of-text id)")
        if len(checked) > context:
            raise ValueError(
                f"{what} has {len(checked)} tokens, more than the {context} that fit; shorten it"
            )
        return checked

    def _scoring(self, ids: Sequence[int], start: int, top: int, reuse_prefix: bool) -> Request:
        checked = self._prompt(ids, "ids", self.config.max_position_embeddings + 1)
        first = in_range("start", start, int, 1, len(checked))
        count = in_range("top", top, int, 0, min(MAX_LOGPROBS, self.config.vocab_size))
        if not isinstance(reuse_prefix, bool):
            raise ValueError(f"reuse_prefix = {reuse_prefix!r} must be True or False")
        return Request([checked], score_from=first, logprobs=count, reuse_prefix=reuse_prefix)

    def _request(self, prompts: list[list[int]], options: GenerationOptions, masked: bool = False) -> Request:
        request = dataclasses.replace(
            options.request(prompts, self.config.vocab_size, self.eos_ids), masked=masked
        )
        self._open().check(request)
        return request

    def _joining(self, prompt_ids: Sequence[int], masked: bool, options: dict[str, Any]) -> Request:
        prompts = [self._prompt(prompt_ids, "prompt_ids")]
        return self._request(prompts, GenerationOptions.from_kwargs(options), masked)

    def _acquire(self) -> None:
        if not self.request_lock.acquire(blocking=False):
            raise RuntimeError("the engine is busy with another request; finish or close its stream first")

    @contextlib.contextmanager
    def _start(self, request: Request, running: Running | None = None) -> Iterator[Decoder]:
        """The decoder at work on the request; what still runs at the end of the block is
        cancelled and waited for.

        RuntimeError while another request has not ended.
        """
        decoder, running = self._open(), running or Running()
        self._acquire()
        try:
            self._running = running
            decoder.start(request)
            running.begin(decoder)
            try:
                yield decoder
            finally:
                running.end()
                decoder.cancel()
                if os.getpid() == self._process:  # a forked child has nobody to wait for
                    wait(decoder)
        finally:
            self.request_lock.release()

    def _result(
        self,
        started: AbstractContextManager[Decoder],
        read: Callable[[Decoder], T],
        even_cancelled: bool = False,
    ) -> T:
        """What `read` finds at the request's end; Cancelled, or with `even_cancelled` what there is by then."""
        with started as decoder:
            wait(decoder)
            if not even_cancelled:
                self._running.expect_finished()
            return read(decoder)

    def _tokens(
        self, request: Request, running: Running, read: Callable[[Decoder, list[int], int], list[T]]
    ) -> Generator[T, None, None]:
        """What `read` makes of new token ids and the index of their first, one by one."""
        known, finished = 0, False
        # started here and not by `stream`: an iterator that is never advanced must not leave
        # a request running
        with self._start(request, running) as decoder:
            while not finished:
                tokens, finished = decoder.poll(known, SIGNAL_POLL_S, False)
                yield from read(decoder, tokens, known)
                known += len(tokens)
            running.expect_finished()
