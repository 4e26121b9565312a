"""Engine: one model on T threads that own its lanes, one request at a time; the loop itself is C++ (csrc/)."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from ..config import MODULES, LaneformerConfig
from .cpu import _core
from .cpu.packed import PackedWeights
from .cpu.packing import RandomTensors, core_spec, load_tensors
from .device import cuda_devices, default_threads, one_cpu_a_core_first
from .folder import Tensor, read_checkpoint
from .options import MOST_LOGPROBS, GenerationOptions, checked_ids, in_range
from .results import GeneratedToken, Generation, PromptLogprobs, Statistics
from .text import StopStrings, TextStream, text_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DTYPE_NAMES = ("bf16", "fp16", "fp32", "int8")
MAX_THREADS = 1024
SIGNAL_POLL_S = 0.1  # how long Ctrl-C may wait while C++ works
MOST_SEQUENCES = 8  # of one batch

T = TypeVar("T")


class Engine:
    """Decodes one request at a time on the CPU. A context manager; `close()` frees the weights and the threads.

    `from_pretrained` and `random` give a CudaEngine (cuda/engine.py) for device "cuda", or "cuda:0,cuda:1" for several
    GPUs; "auto" is the CPU for now (device.py).

    `dtype` is that of the matrices: "auto" keeps the checkpoint's, "int8" rounds each row to multiples of its own scale
    (weights only: embedding, norms and activations keep their types).
    `math="exact"` widens weights to fp32 and keeps fp32 activations: greedy output equals the float32 model's.
    `math="bf16"` rounds every matrix input to bf16 (vdpbf16ps where the CPU has it); it needs bf16 weights.
    `isa` chooses the instruction set: "auto", "avx512_bf16", "avx512", "avx2" or "portable"; the environment
    variable LANEFORMER_ISA sets the default. `pin` keeps each thread on a CPU of its own, one a core while they last:
    for an engine that has the machine to itself.
    """

    def __init__(
        self,
        config: LaneformerConfig,
        tensors: Mapping[str, Tensor],
        *,
        dtype: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        isa: str | None = None,
        math: str = "exact",
        pin: bool = False,
        eos_ids: Sequence[int] = (),
        tokenizer: Tokenizer | None = None,
        packed: PackedWeights | None = None,
    ):
        """Pack checked tensors (`checkpoint.expected_shapes`); ValueError for unknown options and non-finite values."""
        if device not in ("auto", "cpu"):
            raise ValueError(f"device = {device!r}: this class is the CPU's; use from_pretrained or random for 'cuda'")
        if math not in ("exact", "bf16"):
            raise ValueError(f"math = {math!r} is unknown; choose 'exact' or 'bf16'")
        if dtype not in ("auto", *DTYPE_NAMES):
            raise ValueError(f"dtype = {dtype!r} is unknown; choose from {('auto', *DTYPE_NAMES)}")
        if threads is not None and (type(threads) is not int or not 1 <= threads <= MAX_THREADS):
            raise ValueError(f"threads = {threads!r} must be an integer from 1 to {MAX_THREADS}, or None for all cores")
        self.config = config
        self.dtype = tensors["lm_head.weight"].dtype if dtype == "auto" else dtype
        if math == "bf16" and self.dtype != "bf16":
            raise ValueError(f"math = 'bf16' needs bf16 weights, these are {self.dtype}; use math = 'exact'")
        self.math = math
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        isa = isa or os.environ.get("LANEFORMER_ISA") or "auto"
        wanted = threads or default_threads(config.num_lanes)
        self._request_lock = threading.Lock()  # held from a request's start until its results are read
        embedding = tensors["tok_embeddings.weight"].dtype if self.dtype == "int8" else self.dtype
        cpus = one_cpu_a_core_first() if pin else []
        self._decoder: _core.Decoder | None = _core.Decoder(
            core_spec(config), self.dtype, embedding, wanted, isa, math == "bf16", cpus
        )
        load_tensors(self._decoder, config, tensors, self.dtype, packed)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: str = "auto",
        dtype: str = "auto",
        threads: int | None = None,
        cache: bool = True,
        context_tokens: int | None = None,
        **options: Any,
    ) -> Engine:
        """Load a Hugging Face folder; `options` are `isa`, `math`, `pin` of Engine. ValueError when the folder is bad.

        `cache` keeps the packed weights in `path`/.packed (or the user's cache directory) for the next start; GPUs
        pack them anew. `context_tokens` replaces the config's max_position_embeddings.
        """
        devices = cuda_devices(device)
        folder = Path(path)
        checkpoint = read_checkpoint(folder)
        options |= {"eos_ids": checkpoint.eos_ids, "tokenizer": read_tokenizer(folder)}
        packed = PackedWeights(folder, checkpoint.files) if cache else None
        config = checkpoint.config
        if context_tokens is not None:
            config = dataclasses.replace(config, max_position_embeddings=context_tokens)
        options |= {"dtype": dtype, "threads": threads}
        return cls._opened(config, checkpoint.tensors, devices, packed, options)

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

        int8 is made of the bf16 weights of the same seed.
        """
        config = LaneformerConfig.from_flavor(flavor) if isinstance(flavor, str) else flavor
        if dtype not in DTYPE_NAMES:
            raise ValueError(f"dtype = {dtype!r} is unknown; random weights are one of {DTYPE_NAMES}")
        tensors = RandomTensors(config, "bf16" if dtype == "int8" else dtype, seed)
        return cls._opened(config, tensors, cuda_devices(device), None, options | {"dtype": dtype})

    @classmethod
    def _opened(
        cls,
        config: LaneformerConfig,
        tensors: Mapping[str, Tensor],
        devices: Sequence[str],
        packed: PackedWeights | None,
        options: dict[str, Any],
    ) -> Engine:
        """On these GPUs, or on the CPU where there are none."""
        if devices:
            from .cuda.engine import CudaEngine  # not before: it imports torch

            return CudaEngine(config, tensors, devices=devices, **options)
        return cls(config, tensors, packed=packed, **options)

    def generate(self, prompt_ids: Sequence[int], **options: Any) -> list[int]:
        """New token ids after the prompt; options are those of GenerationOptions."""
        return self._wait(self._start(self._request(prompt_ids, without_logprobs(options))))[0]

    def stream(self, prompt_ids: Sequence[int], **options: Any) -> Generator[int, None, None]:
        """The tokens of `generate`, each as soon as it is known; closing the iterator cancels the request."""
        request = self._request(prompt_ids, without_logprobs(options))
        return self._tokens(request, lambda decoder, ids, first: ids)

    def generate_batch(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
        """`generate` for 1 to 8 prompts that share each pass over the weights; each as if it were alone."""
        given: Any = prompts.tolist() if hasattr(prompts, "tolist") else prompts  # arrays and tensors
        if isinstance(given, str) or not hasattr(given, "__len__") or not 1 <= len(given) <= MOST_SEQUENCES:
            raise ValueError(f"prompts must be a list of 1 to {MOST_SEQUENCES} prompts, each a list of token ids")
        checked = [self._prompt(prompt, f"prompts[{i}]") for i, prompt in enumerate(given)]
        return self._wait(self._start(self._arguments(checked, without_logprobs(options))))

    def generate_detailed(self, prompt_ids: Sequence[int], **options: Any) -> Generation:
        """`generate` with log-probabilities (option `logprobs`), the reason of the end, and statistics."""
        request = self._request(prompt_ids, GenerationOptions.from_kwargs(options))

        def read(decoder: _core.Decoder) -> Generation:
            ids = decoder.outputs()[0]
            reason = "stop" if ids and ids[-1] in request["stop_ids"] else "length"
            tokens = described(decoder, ids, 0, request["top_logprobs"])
            return Generation(tokens, reason, len(request["prompts"][0]), statistics_of(decoder))

        return self._result(self._start(request), read)

    def stream_detailed(self, prompt_ids: Sequence[int], **options: Any) -> Generator[GeneratedToken, None, None]:
        """The tokens of `generate_detailed`, each as soon as it is known."""
        request = self._request(prompt_ids, GenerationOptions.from_kwargs(options))
        return self._tokens(request, lambda d, ids, first: described(d, ids, first, request["top_logprobs"]))

    def generate_text(self, prompt: str, *, stop: str | Sequence[str] = (), **options: Any) -> str:
        """Text after the prompt, without the stop string that ended it; needs a tokenizer."""
        return "".join(self.stream_text(prompt, stop=stop, **options))

    def stream_text(self, prompt: str, *, stop: str | Sequence[str] = (), **options: Any) -> Generator[str, None, None]:
        """The text of `generate_text` in pieces: whole characters, and never a part of a stop string."""
        if self.tokenizer is None:
            raise ValueError(
                "this engine has no tokenizer (the model folder holds no tokenizer.json), which text needs"
            )
        if not isinstance(prompt, str):
            raise ValueError(f"prompt must be text, not {type(prompt).__name__}")
        ids = self.tokenizer.encode(prompt).ids
        tokens, stops = self.stream(ids, **options), StopStrings(stop)
        return text_of(tokens, TextStream(self.tokenizer, ids), stops)

    @overload
    def logprobs(self, ids: Sequence[int], *, start: int = 1, reuse_prefix: bool = True) -> np.ndarray: ...
    @overload
    def logprobs(
        self, ids: Sequence[int], *, top: int, start: int = 1, reuse_prefix: bool = True
    ) -> PromptLogprobs: ...
    def logprobs(
        self, ids: Sequence[int], *, top: int | None = None, start: int = 1, reuse_prefix: bool = True
    ) -> np.ndarray | PromptLogprobs:
        """log p(ids[i] | ids[:i]) for i >= start, float32 (len(ids) - start,); with `top` also the likeliest ids.

        The last id is only predicted, never read. A later `start` saves the head's work, and that of the positions
        before it that are still in the KV cache, as when many continuations follow one context.
        """
        checked = self._prompt(ids, "ids", self.config.max_position_embeddings + 1)
        first = in_range("start", start, int, 1, len(checked))
        count = 0 if top is None else in_range("top", top, int, 0, min(MOST_LOGPROBS, self.config.vocab_size))
        if not isinstance(reuse_prefix, bool):
            raise ValueError(f"reuse_prefix = {reuse_prefix!r} must be True or False")
        decoder = self._score(checked, first, count, reuse_prefix, False)

        def read(decoder: _core.Decoder) -> np.ndarray | PromptLogprobs:
            logprobs, top_ids, top_logprobs = decoder.scores(0, len(checked) - first)
            if top is None:
                return logprobs
            top_ids, top_logprobs = (a.reshape(len(logprobs), count) for a in (top_ids, top_logprobs))
            greedy = (top_ids[:, :1] == np.array(checked[first:], np.int32)[:, None]).any(1)
            return PromptLogprobs(logprobs, top_ids, top_logprobs, greedy)

        return self._result(decoder, read)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """The logits after every position, float32 (len(ids), V)."""
        decoder = self._score(self._prompt(ids, "ids"), 1, 0, False, True)
        return self._result(decoder, lambda d: d.logits()).reshape(-1, self.config.vocab_size)

    def _partials(self, ids: Sequence[int], positions: Sequence[int]) -> np.ndarray:
        """What each module put out at some positions (ascending), for checks: float32 (positions, layers, 2, L, D)."""
        checked = self._prompt(ids, "ids")
        decoder = self._begin(lambda d: d.start_scoring(checked, len(checked), 0, False, True, list(positions)))
        c = self.config
        shape = len(positions), c.num_hidden_layers, len(MODULES), c.num_lanes, c.hidden_size
        return self._result(decoder, lambda d: d.partials()).reshape(shape)

    @property
    def statistics(self) -> Statistics:
        """Of the last request: reused positions, passes, guesses."""
        return statistics_of(self._open())

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

    def close(self) -> None:
        """Stop the threads and free the weights; safe to call twice."""
        decoder, self._decoder = self._decoder, None
        if decoder is not None:
            decoder.cancel()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self) -> _core.Decoder:
        if self._decoder is None:
            raise ValueError("this engine is closed")
        return self._decoder

    def _prompt(self, ids: Sequence[int], what: str, longest: int | None = None) -> list[int]:
        checked = checked_ids(ids, self.config.vocab_size, what)
        context = longest or self.config.max_position_embeddings
        if not checked:
            raise ValueError(f"{what} is empty; give at least one token (such as the begin-of-text id)")
        if len(checked) > context:
            raise ValueError(f"{what} has {len(checked)} tokens, more than the {context} that fit; shorten it")
        return checked

    def _request(self, prompt_ids: Sequence[int], options: GenerationOptions, probe_every: int = 0) -> dict[str, Any]:
        return self._arguments([self._prompt(prompt_ids, "prompt_ids")], options, probe_every)

    def _arguments(self, prompts: list[list[int]], options: GenerationOptions, probe_every: int = 0) -> dict[str, Any]:
        """The checked argument of the decoder's `start`."""
        self._open()
        checked = options.for_decoder(self.config.vocab_size, self.eos_ids)
        return {**checked, "prompts": prompts, "probe_every": probe_every}

    def _start(self, request: dict[str, Any]) -> _core.Decoder:
        return self._begin(lambda decoder: decoder.start(request))

    def _score(self, ids: list[int], start: int, top: int, reuse_prefix: bool, keep_logits: bool) -> _core.Decoder:
        return self._begin(lambda decoder: decoder.start_scoring(ids, start, top, reuse_prefix, keep_logits))

    def _begin(self, start: Callable[[_core.Decoder], None]) -> _core.Decoder:
        """The decoder with a running request, which `_finish` ends; RuntimeError while another one is not ended."""
        decoder = self._open()
        if not self._request_lock.acquire(blocking=False):
            raise RuntimeError("the engine is busy with another request; finish or close its stream first")
        try:
            start(decoder)
        except BaseException:
            self._request_lock.release()
            raise
        return decoder

    def _finish(self, decoder: _core.Decoder) -> None:
        try:
            cancel_and_wait(decoder)
        finally:
            self._request_lock.release()

    def _wait(self, decoder: _core.Decoder) -> list[list[int]]:
        """The new tokens of every sequence, at the request's end."""
        return self._result(decoder, lambda d: d.outputs())

    def _result(self, decoder: _core.Decoder, read: Callable[[_core.Decoder], T]) -> T:
        """What `read` finds at the request's end."""
        try:
            while not decoder.poll(0, SIGNAL_POLL_S, True)[1]:
                pass
            return read(decoder)
        finally:
            self._finish(decoder)

    def _tokens(
        self, request: dict[str, Any], read: Callable[[_core.Decoder, list[int], int], list[T]]
    ) -> Generator[T, None, None]:
        """What `read` makes of new token ids and the index of their first, one by one."""
        # started here and not by `stream`: an iterator that is never advanced must not leave a request running
        decoder = self._start(request)
        known, finished = 0, False
        try:
            while not finished:
                tokens, finished = decoder.poll(known, SIGNAL_POLL_S, False)
                yield from read(decoder, tokens, known)
                known += len(tokens)
        finally:
            self._finish(decoder)


def without_logprobs(options: dict[str, Any]) -> GenerationOptions:
    if options.get("logprobs") is not None:
        raise ValueError("logprobs: this call returns token ids only; use generate_detailed or stream_detailed")
    return GenerationOptions.from_kwargs(options)


def described(decoder: _core.Decoder, ids: list[int], first: int, top: int) -> list[GeneratedToken]:
    """Tokens first, first + 1, ... of the running request, with their log-probabilities where they were asked for."""
    if top < 0:
        return [GeneratedToken(i) for i in ids]
    logprobs, top_ids, top_logprobs = (values.tolist() for values in decoder.scores(first, len(ids)))
    pairs = list(zip(top_ids, top_logprobs, strict=True))
    return [GeneratedToken(i, logprobs[n], tuple(pairs[n * top : (n + 1) * top])) for n, i in enumerate(ids)]


def statistics_of(decoder: _core.Decoder) -> Statistics:
    values = decoder.statistics()
    return Statistics(values["reused"], values["passes"], values["proposed"], values["accepted"])


def cancel_and_wait(decoder: _core.Decoder) -> None:
    decoder.cancel()
    while not decoder.poll(0, SIGNAL_POLL_S, True)[1]:
        pass


def read_tokenizer(folder: Path) -> Tokenizer | None:
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} cannot be read as a tokenizer: {error}") from None
