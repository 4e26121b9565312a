"""The decoder on the CPU: packs named tensors into the tapes of the C++ core (csrc/), which decodes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...config import EMBEDDING, LaneformerConfig
from ...tensors import AS_IN_FILE, FIRST_MATRIX, Tensor, type_of
from ..decoder import KV_BYTES, Collected, DraftHead, DraftModel, Ended, Request
from ..machine import Machine, free_memory_bytes, this_machine
from ..options import in_range, one_of
from . import _core
from .packed import LAYOUT_VERSION, PackedWeights
from .saved import DEFAULT_BYTES, SavedPrefixes, max_reusable, model_key
from .spec import choose_types, core_spec
from .weights import check_dtypes, load_matrices, load_vectors

log = logging.getLogger(__name__)
MAX_THREADS, MAX_BYTES = 1024, 2**63 - 1
CACHED_SHARE = 4  # of the memory that is left, for keys and values
MATHS = {  # how activations enter matrix products, and the weights that they meet
    "exact": ("bf16", "fp16", "fp32", "int8"),
    "bf16": ("bf16",),
    "int8": ("int8", "int4", AS_IN_FILE),
}
CHOSEN_MATHS = ("auto", "fast")  # for the weights, and for the CPU too
MULTIPLIES_BF16 = ("avx512_bf16", "amx")  # others would round inputs and gain no speed


class CpuDecoder(_core.Decoder):
    """The C++ decoder with its weights loaded; its loop runs on its own threads.

    threads: default all physical cores, or as many as the container's CPU quota allows.
    isa: "auto", "amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2" or "portable"; default from
        the environment variable LANEFORMER_ISA. Results are bit-identical alone, batched or drafted, except on
        "amx" with bf16 weights, where passes of four positions and more differ by about 1e-6.
    math: "exact" widens weights to fp32, keeps fp32 activations; with kv_dtype="fp32", greedy output equals the
        float32 model's. "bf16" rounds matrix inputs to bf16 and needs bf16 weights. "int8" rounds every 32 matrix
        inputs to int8 and needs int8, int4 or gguf weights. "auto": "exact" where the weights permit it, else
        "int8". "fast", the default of the `laneformer` commands: "int8" for int8 weights, too, and "bf16" for bf16
        ones where the CPU multiplies those.
    pin: bind each thread to its own CPU, one per core first. Default on machines with several memory nodes; meant
        for an engine that has the machine to itself.
    kv_dtype: of cached keys and values. "auto": "fp32" for fp32 weights, else "fp16", which raises ValueError
        for values beyond 65,504; "bf16" holds them. "int8" has a scale for each head and position
        (docs/long-context.md).
    cache_bytes: memory for keys and values of earlier requests, whose prefixes new prompts reuse. Default: a
        quarter of the free memory.
    cache_dir: a directory that keeps prefixes for the next start (saved.py). cache_dir_bytes: of all its files.
    packed: maps the packed weights of an earlier start, or keeps them for the next one.
    """

    max_joined = _core.MAX_SEQUENCES
    failure: str | None = None
    prefixes: SavedPrefixes | None = None
    draft_model: DraftModel | None = None

    @property
    def draft_head(self) -> DraftHead | None:
        if self.draft_model is not None or not self.config.num_nextn_predict_layers:
            return None
        return DraftHead(
            self.config.draft_vocab_size or self.config.vocab_size, self.draft_weight_bytes
        )

    def __init__(
        self,
        config: LaneformerConfig,
        tensors: Mapping[str, Tensor],
        dtype: str = "auto",
        *,
        threads: int | None = None,
        isa: str | None = None,
        math: str = "auto",
        pin: bool | None = None,
        kv_dtype: str = "auto",
        cache_bytes: int | None = None,
        cache_dir: Path | None = None,
        cache_dir_bytes: int = DEFAULT_BYTES,
        packed: PackedWeights | None = None,
    ):
        one_of("math", math, (*CHOSEN_MATHS, *MATHS))
        one_of("kv_dtype", kv_dtype, ("auto", *KV_BYTES))
        if threads is not None:
            in_range("threads", threads, int, 1, MAX_THREADS)
        if cache_bytes is not None:
            in_range("cache_bytes", cache_bytes, int, 0, MAX_BYTES)
        in_range("cache_dir_bytes", cache_dir_bytes, int, 0, MAX_BYTES)
        self.config = config
        self.dtype = type_of(tensors, FIRST_MATRIX) if dtype == "auto" else dtype
        isa = isa or os.environ.get("LANEFORMER_ISA") or "auto"
        self.math = choose_math(math, self.dtype, isa)
        self.kv_dtype = kv_dtype
        if kv_dtype == "auto":
            self.kv_dtype = "fp32" if self.dtype == "fp32" else "fp16"
        types = choose_types(config, tensors) if self.dtype == AS_IN_FILE else []
        machine = this_machine()
        pin = machine.nodes > 1 if pin is None else pin
        if threads and threads > machine.processors:
            log.warning("threads = %d: this machine runs only %g", threads, machine.processors)
        super().__init__(
            {**core_spec(config, tensors), "kv_dtype": self.kv_dtype, "held": types},
            "int8" if types else self.dtype,
            embedding_dtype(config, tensors, self.dtype),
            threads or plan_threads(machine, config.num_lanes),
            isa,
            self.math,
            machine.one_cpu_a_core_first() if pin else [],
            machine.processors,
        )
        load_vectors(self, config, tensors)
        if packed is None or not packed.load(self, self._plan):
            if dtype == "auto":
                check_dtypes(config, tensors, self.dtype)
            load_matrices(self, config, tensors)
            if packed is not None:
                packed.save(self, self._plan)
        if cache_bytes is None:
            cache_bytes = free_memory_bytes() // CACHED_SHARE
        self.cache_bytes = cache_bytes
        self.set_cache_limit(cache_bytes)
        self.prefetch_bytes = self.tune(int(os.environ.get("LANEFORMER_PREFETCH") or -1))
        if cache_dir is not None:
            key = model_key(self, (self.dtype, self.math, self.kv_dtype), config, tensors)
            self.prefixes = SavedPrefixes(self, Path(cache_dir), cache_dir_bytes, key)

    def join(self, requests: Sequence[Request]) -> list[int]:
        if self.prefixes is not None:
            for request in requests:
                self.prefixes.load(request.prompt, max_reusable(request))
        return super().join(requests)

    def collect(self, timeout_s: float) -> list[Collected]:
        progress = [
            Collected(ticket, first, tokens, scores, ended and Ended(*ended))
            for ticket, first, tokens, scores, ended in super().collect(timeout_s)
        ]
        if self.prefixes is not None and (progress or self.leaves):
            self.prefixes.wake()
        return progress

    def close(self) -> None:
        """End all requests and save their prefixes; threads and weights go with the object."""
        self.leave_all()
        if self.prefixes is not None:
            self.prefixes.close()

    @property
    def _plan(self) -> dict[str, Any]:
        """Everything beside the weights that decides the packed bytes."""
        # the context decides only tables by position, which are not packed
        config = self.config.to_dict()
        del config["max_position_embeddings"]
        return {
            "layout": LAYOUT_VERSION,
            "dtype": self.dtype,
            "threads": self.threads,
            "config": config,
        }


def plan_threads(machine: Machine, lanes: int) -> int:
    """Return the number of threads that leaves the slowest one least to do."""
    # csrc/tapes.cpp, share_lanes: further threads would make no pass faster
    return min(range(1, machine.threads + 1), key=lambda n: (_core.largest_share(lanes, n), n))


def choose_math(math: str, dtype: str, isa: str) -> str:
    """Return the arithmetic that `math` means for this dtype; ValueError where it needs another one."""
    fitting = [name for name, dtypes in MATHS.items() if dtype in dtypes]
    if math not in (*CHOSEN_MATHS, *fitting):
        raise ValueError(
            f"math = {math!r} needs {' or '.join(MATHS[math])} weights, these are {dtype}; "
            f"use math = {' or '.join(map(repr, fitting))}"
        )
    if math not in CHOSEN_MATHS:
        return math
    if "exact" not in fitting:
        return fitting[0]
    # "fast" is the arithmetic with which this CPU reads prompts fastest
    rounds = dtype == "int8" or (dtype == "bf16" and _core.isa_of(isa) in MULTIPLIES_BF16)
    return fitting[-1] if math == "fast" and rounds else "exact"


def embedding_dtype(config: LaneformerConfig, tensors: Mapping[str, Tensor], dtype: str) -> str:
    # rows are read one at a time, so quantised models keep their 16 or 32 bits
    if dtype not in ("int8", "int4", AS_IN_FILE):
        return dtype
    checkpoint_dtype = "fp16" if config.tie_word_embeddings else type_of(tensors, EMBEDDING)
    return "fp16" if checkpoint_dtype in _core.BLOCKS else checkpoint_dtype
