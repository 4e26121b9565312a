"""Engine: one model on T threads that own its lanes, one request at a time; the loop itself is C++ (csrc/)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config import LaneformerConfig
from . import _core
from .checkpoint import Tensor, read_checkpoint
from .options import GenerationOptions, checked_ids
from .packed import PackedWeights
from .packing import RandomTensors, core_spec, load_tensors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DTYPE_NAMES = ("bf16", "fp16", "fp32")
MAX_THREADS = 1024
SIGNAL_POLL_S = 0.1  # how long Ctrl-C may wait while C++ works


class Engine:
    """Decodes one request at a time on the CPU. A context manager; `close()` frees the weights and the threads.

    `math="exact"` widens weights to fp32 and keeps fp32 activations: greedy output equals the float32 model's.
    `math="bf16"` rounds every matrix input to bf16 (vdpbf16ps where the CPU has it); it needs bf16 weights.
    `isa` chooses the instruction set: "auto", "avx512_bf16", "avx512", "avx2" or "portable"; the environment
    variable LANEFORMER_ISA sets the default.
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
        eos_ids: Sequence[int] = (),
        tokenizer: Tokenizer | None = None,
        packed: PackedWeights | None = None,
    ):
        """Pack checked tensors (`checkpoint.expected_shapes`); ValueError for unknown options and non-finite values."""
        check_device(device)
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
        self._decoder: _core.Decoder | None = _core.Decoder(core_spec(config), self.dtype, wanted, isa, math == "bf16")
        load_tensors(self._decoder, config, tensors, self.dtype, packed)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: str = "auto",
        dtype: str = "auto",
        threads: int | None = None,
        cache: bool = True,
        **options: Any,
    ) -> Engine:
        """Load a Hugging Face folder; `options` are `isa` and `math` of Engine. ValueError when the folder is bad.

        `cache` keeps the packed weights in `path`/.packed (or the user's cache directory) for the next start.
        """
        check_device(device)
        folder = Path(path)
        checkpoint = read_checkpoint(folder)
        options |= {"eos_ids": checkpoint.eos_ids, "tokenizer": read_tokenizer(folder)}
        options |= {"packed": PackedWeights(folder, checkpoint.files)} if cache else {}
        return cls(checkpoint.config, checkpoint.tensors, dtype=dtype, threads=threads, **options)

    @classmethod
    def random(cls, flavor: str | LaneformerConfig, dtype: str = "bf16", seed: int = 0, **options: Any) -> Engine:
        """Random weights of a flavor's shapes, for benchmarks without a checkpoint; `options` as in Engine."""
        config = LaneformerConfig.from_flavor(flavor) if isinstance(flavor, str) else flavor
        if dtype not in DTYPE_NAMES:
            raise ValueError(f"dtype = {dtype!r} is unknown; random weights are one of {DTYPE_NAMES}")
        return cls(config, RandomTensors(config, dtype, seed), dtype=dtype, **options)

    def generate(self, prompt_ids: Sequence[int], **options: Any) -> list[int]:
        """New token ids after the prompt; options are those of GenerationOptions."""
        request = self._request(prompt_ids, GenerationOptions.from_kwargs(options))
        return self._wait(self._start(request))

    def stream(self, prompt_ids: Sequence[int], **options: Any) -> Iterator[int]:
        """The tokens of `generate`, each as soon as it is known; closing the iterator cancels the request."""
        return self._tokens(self._request(prompt_ids, GenerationOptions.from_kwargs(options)))

    def logprobs(self, ids: Sequence[int]) -> np.ndarray:
        """log p(ids[i + 1] | ids[: i + 1]), float32 (len(ids) - 1,); the last id is only predicted, never read."""
        return self._score(ids, keep_logits=False).logprobs()

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """The logits after every position, float32 (len(ids), V)."""
        return self._score(ids, keep_logits=True).logits().reshape(-1, self.config.vocab_size)

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
        """The checked arguments of the decoder's `start`."""
        self._open()
        prompt = self._prompt(prompt_ids, "prompt_ids")
        stops = checked_ids(options.stop_ids, self.config.vocab_size, "stop_ids")
        stops += [] if options.ignore_eos else self.eos_ids
        room = self.config.max_position_embeddings - len(prompt) + 1
        sampling = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
        new_tokens = min(options.max_new_tokens, room)
        return {
            "prompt": prompt,
            "max_new_tokens": new_tokens,
            "stop_ids": stops,
            "probe_every": probe_every,
            **sampling,
        }

    def _start(self, request: dict[str, Any]) -> _core.Decoder:
        decoder = self._open()
        decoder.start(**request)
        return decoder

    def _score(self, ids: Sequence[int], keep_logits: bool) -> _core.Decoder:
        decoder = self._open()
        longest = self.config.max_position_embeddings + (not keep_logits)
        decoder.start_scoring(self._prompt(ids, "ids", longest), keep_logits)
        self._wait(decoder)
        return decoder

    def _wait(self, decoder: _core.Decoder) -> list[int]:
        try:
            while True:
                tokens, finished = decoder.poll(0, SIGNAL_POLL_S, True)
                if finished:
                    return tokens
        except BaseException:
            cancel_and_wait(decoder)
            raise

    def _tokens(self, request: dict[str, Any]) -> Iterator[int]:
        # started here and not by `stream`: an iterator that is never advanced must not leave a request running
        decoder = self._start(request)
        known, finished = 0, False
        try:
            while not finished:
                tokens, finished = decoder.poll(known, SIGNAL_POLL_S, False)
                known += len(tokens)
                yield from tokens
        finally:
            cancel_and_wait(decoder)


def check_device(device: str) -> None:
    if device == "cuda":
        raise ValueError("device = 'cuda': the CUDA engine is not in this version; use 'cpu' or 'auto'")
    if device not in ("auto", "cpu"):
        raise ValueError(f"device = {device!r} is unknown; choose 'auto' or 'cpu'")


def default_threads(lanes: int) -> int:
    """All usable cores, in equal groups where they outnumber the lanes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if cores <= lanes else cores // lanes * lanes


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
