"""The decoder on the CPU: packs a config and named tensors into the tapes of the C++
core (csrc/), which decodes.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...config import (
    BIASED,
    DRAFT_IDS,
    EMBEDDING,
    HEAD,
    HEAD_NORMS,
    LM_HEAD_TYPES,
    MATRICES,
    MODULES,
    MTP,
    NORMS,
    LaneformerConfig,
)
from ...llama.variant import GATES, POST_NORMS, ROUTER, variant_of
from ...tensors import AS_IN_FILE, FIRST_MATRIX, Tensor, type_of
from ..decoder import KV_BYTES, Collected, DraftHead, DraftModel, Ended, Request
from ..folder import query_scales, rope_tables
from ..machine import Machine, free_memory_bytes, this_machine
from ..options import in_range, one_of
from . import _core
from .packed import LAYOUT_VERSION, PackedWeights
from .saved import DEFAULT_BYTES, SavedPrefixes, max_reusable, model_key

log = logging.getLogger(__name__)
MAX_THREADS, MAX_BYTES = 1024, 2**63 - 1
CACHED_SHARE = 4  # of the memory that is left, for keys and values
GROUP_INPUTS = 32  # that blocks give a scale
EXPERTS = ("experts", "active", "normed_weights", "expert_bias")  # in the core's words
MATHS = {  # how activations enter matrix products, and the weights that they meet
    "exact": ("bf16", "fp16", "fp32", "int8"),
    "bf16": ("bf16",),
    "int8": ("int8", "int4", AS_IN_FILE),
}
CHOSEN_MATHS = ("auto", "fast")  # for the weights, and for the CPU too
MULTIPLIES_BF16 = ("avx512_bf16", "amx")  # others would round inputs and gain no speed


class CpuDecoder(_core.Decoder):
    """The C++ decoder with its weights loaded; its loop runs on threads of its own.

    threads: default all physical cores, or what the container's CPU quota allows.
    isa: "auto", "amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2" or "portable"; default from
        the environment variable LANEFORMER_ISA. Results are bit-identical alone, batched or drafted, except on
        "amx" with bf16 weights, where passes of four positions and more differ by about 1e-6.
    math: "exact" widens weights to fp32 and keeps fp32 activations; with kv_dtype="fp32", greedy output equals
        the float32 model's. "bf16" rounds matrix inputs to bf16 (vdpbf16ps where the CPU has it) and needs bf16
        weights. "int8" rounds every 32 matrix inputs to int8 and needs int8, int4 or gguf weights. "auto", the
        default, is "exact" wherever the weights permit it, and "int8" for int4 and gguf. "fast", which the
        `laneformer` commands take, is "int8" for int8 weights, too, and "bf16" for bf16 ones where the CPU
        multiplies those.
    pin: bind each thread to a CPU of its own, one per core first. Default on machines with several memory
        nodes; meant for an engine that has the machine to itself.
    kv_dtype: of cached keys and values. "auto": "fp32" for fp32 weights, else "fp16", which raises ValueError
        for values beyond 65,504; "bf16" holds them. "int8": integers with a scale for each head and position,
        nearly half of 16 bits (docs/long-context.md has what it costs).
    cache_bytes: memory for keys and values of earlier requests, so that a new prompt reuses the prefix it shares
        with one of them. Default: a quarter of the free memory (schedule/prefix.h).
    cache_dir: a directory that keeps prefixes of earlier requests for the next start (saved.py); `close` saves the
        last ones. cache_dir_bytes: of all its files; default: 10 GB.
    packed: maps the packed weights of an earlier start, or keeps them for the next one.
    """

    max_joined = _core.MAX_SEQUENCES
    failure: str | None = None
    prefixes: SavedPrefixes | None = None
    draft_model: DraftModel | None = None

    @property
    def draft_head(self) -> DraftHead | None:
        """The model's own, where it drafts."""
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
        self.config, self.chosen = config, dtype != "auto"
        self.dtype = dtype if self.chosen else tensors[FIRST_MATRIX].dtype
        isa = isa or os.environ.get("LANEFORMER_ISA") or "auto"
        self.math = chosen_math(math, self.dtype, isa) if math in CHOSEN_MATHS else math
        if self.dtype not in MATHS[self.math]:
            fitting = " or ".join(
                repr(name) for name, dtypes in MATHS.items() if self.dtype in dtypes
            )
            needed = " or ".join(MATHS[math])
            raise ValueError(
                f"math = {math!r} needs {needed} weights, these are {self.dtype}; use math = {fitting}"
            )
        self.kv_dtype = (
            kv_dtype if kv_dtype != "auto" else "fp32" if self.dtype == "fp32" else "fp16"
        )
        embedding, held = (
            self.dtype,
            held_types(config, tensors) if self.dtype == AS_IN_FILE else [],
        )
        if self.dtype in ("int8", "int4", AS_IN_FILE):
            embedding = "fp16" if config.tie_word_embeddings else type_of(tensors, EMBEDDING)
            embedding = "fp16" if embedding in _core.BLOCKS else embedding
        machine = this_machine()
        self.machine, pinned = machine, machine.nodes > 1 if pin is None else pin
        if (threads or 0) > machine.processors:
            log.warning(
                "threads = %d: only %g run at once on this machine", threads, machine.processors
            )
        super().__init__(
            {**core_spec(config, tensors), "kv_dtype": self.kv_dtype, "held": held},
            "int8" if held else self.dtype,
            embedding,
            threads or planned_threads(machine, config.num_lanes),
            isa,
            self.math,
            machine.one_cpu_a_core_first() if pinned else [],
            machine.processors,
        )
        self._load(config, tensors, packed)
        self.cache_bytes = (
            free_memory_bytes() // CACHED_SHARE if cache_bytes is None else cache_bytes
        )
        self.set_cache_limit(self.cache_bytes)
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
        news = [
            Collected(ticket, first, tokens, scores, ended and Ended(*ended))
            for ticket, first, tokens, scores, ended in super().collect(timeout_s)
        ]
        if self.prefixes is not None and (news or self.leaves):
            self.prefixes.wake()
        return news

    def close(self) -> None:
        """End all requests, and save what is to survive; threads and weights go with the object."""
        self.leave_all()
        if self.prefixes is not None:
            self.prefixes.close()

    def _load(
        self, config: LaneformerConfig, tensors: Mapping[str, Tensor], packed: PackedWeights | None
    ) -> None:
        """Pack one tensor at a time; ValueError names the first one with a non-finite value.

        With `packed` the matrices and the embedding come from that cache, or are written to it
        once they are packed.
        """

        def send(name: str, setter: Any, *where: Any) -> None:
            tensor = tensors[name]
            if (
                not self.chosen
                and setter.__name__ in ("set_matrix", "set_embedding")
                and ROUTER not in name
            ):
                self._expect_dtype(name, tensor.dtype)
            if tensor.dtype in _core.BLOCKS and setter.__name__ == "set_matrix":
                setter = self.set_blocks
            if not setter(*where, np.ascontiguousarray(tensor.values), tensor.dtype):
                raise ValueError(
                    f"tensor {name} holds values that are not finite (NaN, or too large for the dtype)"
                )

        layers = [f"layers.{i}." for i in range(config.num_hidden_layers)]
        after = ["norm.weight"]
        if config.num_nextn_predict_layers:
            layers.append(f"{MTP}layer.")
            after += [f"{MTP}{norm}.weight" for norm in ("hidden_norm", "embedding_norm", "norm")]
        self.set_rope(*rope_tables(config))
        if (scales := query_scales(config)) is not None:
            self.set_query_scales(scales)
        before, behind = (
            [f"{layer}{norm}.weight" for layer in layers for norm in kind]
            for kind in (NORMS, POST_NORMS)
        )
        shapes = config.tensor_shapes()
        for index, name in enumerate(before + after + behind):
            if name in shapes:
                send(name, self.set_norm, index)
        for i, layer in enumerate(layers):
            for matrix in (*MATRICES, ROUTER):
                if (bias := f"{layer}{matrix}.bias") in shapes:
                    send(bias, self.set_bias, matrix.split(".")[1], i)
            if variant_of(config).attention_sinks:
                send(f"{layer}attention.sinks.weight", self.set_bias, "sinks", i)
            for norm in HEAD_NORMS if config.qk_norm else ():
                send(f"{layer}{norm}.weight", self.set_head_norm, norm.split(".")[1], i)
        kept = {
            name: value
            for name, value in config.to_dict().items()
            if name != "max_position_embeddings"
        }
        plan = {
            "layout": LAYOUT_VERSION,
            "dtype": self.dtype,
            "threads": self.threads,
            "config": kept,
        }
        if packed is not None and packed.load(self, plan):
            return
        if not config.tie_word_embeddings:
            send(EMBEDDING, self.set_embedding)
        for i, layer in enumerate(layers):
            for matrix in (*MATRICES, ROUTER)[: None if variant_of(config).experts else -1]:
                send(f"{layer}{matrix}.weight", self.set_matrix, matrix.split(".")[1], i)
        send(head_of(config), self.set_matrix, "lm_head", 0)
        if packed is not None:
            packed.save(self, plan)

    def _expect_dtype(self, name: str, dtype: str) -> None:
        """With dtype="auto": ValueError where layers differ, a warning where head or embedding lose digits."""
        if dtype == self.dtype:
            return
        if name.startswith(("layers.", MTP)):
            raise ValueError(
                f"dtype = 'auto': {name} is {dtype} and {FIRST_MATRIX} is {self.dtype}; choose a dtype"
            )
        if self.dtype != "fp32":
            warnings.warn(
                f"{name} is {dtype} and becomes {self.dtype}, the layers' dtype; or choose 'fp32'",
                stacklevel=2,
            )


def planned_threads(machine: Machine, lanes: int) -> int:
    """As many threads as leave the slowest one least to do (csrc/tapes.cpp, share_lanes): cores that are
    left over, or slow, would make no pass faster.
    """
    return min(range(1, machine.threads + 1), key=lambda n: (_core.largest_share(lanes, n), n))


def chosen_math(math: str, dtype: str, isa: str) -> str:
    """What "auto" or "fast" means for weights of this dtype: "auto" is exact where such weights permit it,
    "fast" what this CPU reads prompts with fastest.
    """
    if "exact" not in (fitting := [name for name, dtypes in MATHS.items() if dtype in dtypes]):
        return fitting[0]
    rounds = dtype == "int8" or (dtype == "bf16" and _core.isa_of(isa) in MULTIPLIES_BF16)
    return fitting[-1] if math == "fast" and rounds else "exact"


def held_types(config: LaneformerConfig, tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """The type of each matrix on the tapes: per layer in the order of MATRICES, and last of the head.

    That of the file; int8 where lanes would cut blocks, and where w1 and w3, which share tiles, are of two types.
    """
    shapes = {**config.tensor_shapes(), head_of(config): config.head_shape}

    def held(name: str) -> str:
        kind = type_of(tensors, name)
        return (
            "int8"
            if kind in _core.BLOCKS and shapes[name][-1] % GROUP_INPUTS
            else _core.BLOCKS.get(kind, kind)
        )

    def layer(i: int) -> list[str]:
        types = {matrix: held(f"layers.{i}.{matrix}.weight") for matrix in MATRICES}
        for together in (BIASED, ("feed_forward.w1", "feed_forward.w3")):
            share_tiles = (
                together != BIASED
                or config.query_size // config.num_lanes % 16
                or config.head_dim % 16
            )
            if share_tiles and len({types[matrix] for matrix in together}) > 1:
                types |= dict.fromkeys(together, "int8")
        return [types[matrix] for matrix in MATRICES]

    head = [held(head_of(config))] * (len(MATRICES) + 1)
    return [*([*layer(i), "int8"] for i in range(config.num_hidden_layers)), head]


def head_of(config: LaneformerConfig) -> str:
    """The tensor with the head's rows."""
    return EMBEDDING if config.tie_word_embeddings else HEAD


def core_spec(config: LaneformerConfig, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The config as plain numbers (csrc/model.h), and the ids that can be drafted; every rule about layers is
    decided by config.py, once per layer. The head that drafts has the layer after the last one.
    """
    layers = range(config.num_hidden_layers + config.num_nextn_predict_layers)
    variant = variant_of(config)
    return {
        **dataclasses.asdict(config),
        **vars(variant),
        **dict(zip(EXPERTS, variant.experts or (0, 0, False, False), strict=True)),
        "pre_norms": variant.pre_norms,
        "post_norms": variant.post_norms,
        "gate": GATES.index(variant.hidden_act),
        "attention_scale": variant.attention_scale or 0.0,
        "rope": [-1 if i in config.nope_layers else config.rope_of(i) for i in layers],
        "ropes": max(1, len(config.ropes)),
        "held": [],
        "head": LM_HEAD_TYPES.index(config.lm_head_type),
        "broadcast_delay": min(config.broadcast_delay, config.num_hidden_layers),
        "window": [config.window(i) or 0 for i in layers],
        "join": [[config.join(i, m).code for i in layers] for m in MODULES],
        "adds_delayed": [[int(config.adds_delayed(i, m)) for i in layers] for m in MODULES],
        "delivers": [[int(config.delivers(i, m)) for i in layers] for m in MODULES],
        "draft_ids": tensors[DRAFT_IDS].values.tolist() if config.draft_vocab_size else [],
    }


class RandomTensors(Mapping[str, Tensor]):
    """Tensors made when they are asked for, so that only one exists at a time."""

    def __init__(self, config: LaneformerConfig, dtype: str, seed: int):
        self.dtype, self.seed, self.shapes = dtype, seed, config.tensor_shapes()
        self.deviation = config.initializer_range

    def __getitem__(self, name: str) -> Tensor:
        if name.endswith("norm.weight"):
            return Tensor("fp32", np.ones(self.shapes[name], np.float32))
        if name == DRAFT_IDS:  # as many in each lane's part of the vocabulary
            count = self.shapes[name][0]
            return Tensor(
                "int32", np.arange(count, dtype=np.int32) * (self.shapes[EMBEDDING][0] // count)
            )
        values = np.empty(self.shapes[name], np.float32 if self.dtype == "fp32" else np.uint16)
        key = (self.seed << 32 ^ zlib.crc32(name.encode())) % 2**64
        _core.random_values(values, self.dtype, key, self.deviation)
        return Tensor(self.dtype, values)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)
