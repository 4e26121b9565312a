"""Tensors of other model families under a Laneformer's names and shapes, each translated on access.

Lanes own rows or columns (config.py's `tensor_shapes`).

    L lanes   D hidden   d head dimension   V vocabulary
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..config import EMBEDDING, HEAD, LaneformerConfig
from ..tensors import STORED_TYPES, LazyTensors, Tensor, TensorSource, check_shapes, sources_of
from .config import config_of_llama, text_values
from .experts import Sources, split_experts, stack_experts
from .families import FAMILIES
from .variant import ROUTER, variant_of

WHOLE = {
    EMBEDDING: "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    HEAD: "lm_head.weight",
}
PARTS = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention.post_norm": "post_attention_layernorm",
    "feed_forward.post_norm": "post_feedforward_layernorm",
    "attention_norm": "input_layernorm",
    ROUTER: "mlp.gate",
    "attention.sinks": "self_attn.sinks",
}
# by `norm_placement`
FFN_NORM = {"pre": "post_attention_layernorm", "both": "pre_feedforward_layernorm"}
# of a text model beside a vision tower
NESTED = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?")
OTHER_TOWER = re.compile(r"^(?:model\.)?(?:vision_tower|multi_modal_projector)\.")
COLUMNS = ("attention.wo", "feed_forward.w2")  # where a lane owns columns
ROTATED = ("attention.wq", "attention.wk", "attention.q_norm", "attention.k_norm")
# of old files; a function of the config
IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def laneformer_of(
    values: Mapping[str, Any], tensors: Mapping[str, Tensor], lanes: int, from_gguf: bool = False
) -> tuple[LaneformerConfig, LlamaTensors]:
    """Return a model of one of the families as a Laneformer with delay 0 (see `lanes_for`).

    Args:
        from_gguf: Whether experts are stacked, and norms' offsets included.
    """
    config, sources = config_of_llama(values, lanes), sources_of(tensors)
    if values is not text_values(values):
        values, sources = text_values(values), text_sources(sources)
    family = FAMILIES[values["model_type"]]
    if family.fused:
        sources = split_fused(sources, config)
    if variant_of(config).experts and not from_gguf:
        sources = split_experts(sources) if family.interleaved else stack_experts(sources)
    norm_offset = 0.0 if from_gguf else family.norm_offset
    return config, LlamaTensors(
        config, sources, norm_offset, 1.0 / values.get("logits_scaling", 1.0)
    )


def text_sources(sources: Sources) -> Sources:
    """Return the sources of the text model, named as if it were alone."""
    return {
        NESTED.sub("" if "lm_head" in name else "model.", name): source
        for name, source in sources.items()
        # without the vision tower's tensors
        if not OTHER_TOWER.match(name)
    }


def split_fused(sources: Sources, config: LaneformerConfig) -> Sources:
    """Return Phi's matrices, of which one holds the rows of several, as those of other families."""
    d, kv, f = (
        config.hidden_size,
        config.head_dim * config.num_key_value_heads,
        config.intermediate_size,
    )
    fused = {
        "qkv_proj": {"q_proj": config.query_size, "k_proj": kv, "v_proj": kv},
        "gate_up_proj": {"gate_proj": f, "up_proj": f},
    }
    split: Sources = {}
    for name, source in sources.items():
        module = name.split(".")[-2]
        if module not in fused:
            split[name] = source
            continue
        check_shapes(
            "the checkpoint", {name: source.shape}, {name: (sum(fused[module].values()), d)}
        )
        # the parts' rows follow each other in this order
        first = 0
        for part, rows in fused[module].items():
            load = functools.partial(load_rows, source, slice(first, first + rows))
            split[name.replace(module, part)] = TensorSource(source.dtype, (rows, d), load)
            first += rows
    return split


def load_rows(source: TensorSource, rows: slice) -> Tensor:
    tensor = source.load()
    return dataclasses.replace(tensor, values=tensor.values[rows])


class LlamaTensors(LazyTensors):
    """Tensors named and shaped as `config.tensor_shapes`, made from Hugging Face's on access.

    Args:
        norm_offset: Added to norms' weights.
        logits: Factor of the last norm.
    """

    def __init__(
        self, config: LaneformerConfig, stored: Sources, norm_offset: float, logits: float
    ):
        self.config, self.stored = config, stored
        self.norm_offset, self.logits = norm_offset, logits
        self.variant = variant_of(config)
        ropes = self.variant.ropes
        # of a head's rows
        self.rotated = 2 * len(ropes[0].frequencies) if ropes else config.head_dim
        shapes = config.tensor_shapes()
        sources = {
            name: source.shape for name, source in stored.items() if not IGNORED.fullmatch(name)
        }
        if config.tie_word_embeddings and sources.pop(
            HEAD, ()
        ):  # some files hold the tied head as well
            head, embedding = (stored[WHOLE[name]].load().values for name in (HEAD, EMBEDDING))
            if not np.array_equal(head, embedding):
                raise ValueError(
                    "tie_word_embeddings = True, but lm_head.weight is not the embedding; set it to false"
                )
        names = {name: self._source_of(name) for name in shapes}
        expected = {names[name]: self._source_shape(name, shape) for name, shape in shapes.items()}
        check_shapes("the checkpoint", sources, expected)
        super().__init__(
            {
                name: TensorSource(
                    stored[names[name]].dtype,
                    shape,
                    functools.partial(self._translate, name, shape),
                )
                for name, shape in shapes.items()
            }
        )

    @property
    def has_blocks(self) -> bool:
        return any(source.dtype not in STORED_TYPES for source in self.sources.values())

    def _translate(self, name: str, shape: tuple[int, ...]) -> Tensor:
        part, kind = part_of(name)
        stored = self.stored[self._source_of(name)].load()
        if part.endswith("norm"):
            stored = self._norm(name, stored)
        values = stored.values
        if part in ROTATED:
            # Llama rotates the pairs (j, j + d/2) of a head, model.py the pairs (2j, 2j+1)
            heads = values.reshape(-1, self.config.head_dim, *values.shape[1:])
            # rows beyond those that rotate stay in place
            halves = (
                heads[:, : self.rotated]
                .reshape(-1, 2, self.rotated // 2, *values.shape[1:])
                .swapaxes(1, 2)
            )
            pairs = halves.reshape(len(heads), self.rotated, *values.shape[1:])
            values = np.concatenate((pairs, heads[:, self.rotated :]), 1).reshape(values.shape)
        if (
            stored.dtype not in STORED_TYPES
        ):  # blocks, of which the engine cuts the lanes' rows or columns
            return dataclasses.replace(stored, values=values)
        if part in COLUMNS and kind == "weight":
            # a lane owns columns here, so the lanes' axis moves in front of the rows
            *experts, lanes, rows, columns = shape
            values = values.reshape(*experts, rows, lanes, columns).swapaxes(-3, -2)
        return dataclasses.replace(stored, values=values.reshape(shape))

    def _norm(self, name: str, stored: Tensor) -> Tensor:
        # the divisor of logits is part of the last norm
        factor = self.logits if name == "norm.weight" else 1.0
        if not self.norm_offset and factor == 1.0:
            return stored
        return Tensor("fp32", np.float32(factor) * (np.float32(self.norm_offset) + widen(stored)))

    def _source_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        part, kind = part_of(name)
        if kind == "bias":
            return shape if part in (*COLUMNS, ROUTER) else (*shape[:-2], shape[-2] * shape[-1])
        if part in COLUMNS:
            return *shape[:-3], shape[-2], shape[-3] * shape[-1]
        if name == HEAD:
            return self.config.vocab_size, self.config.hidden_size
        return (*shape[:-3], shape[-3] * shape[-2], shape[-1]) if len(shape) >= 3 else shape

    def _source_of(self, name: str) -> str:
        source = source_of(name, self.variant.norm_placement)
        if self.variant.experts and ROUTER not in name:
            source = source.replace(".mlp.", ".mlp.experts.")
        return source


def widen(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == "bf16":
        return (tensor.values.astype(np.uint32) << 16).view(np.float32)
    return (tensor.values.view(np.float16) if tensor.dtype == "fp16" else tensor.values).astype(
        np.float32
    )


def part_of(name: str) -> tuple[str, str]:
    """Return ("attention.wq", "weight") for "layers.3.attention.wq.weight"."""
    part, _, kind = re.sub(r"^layers\.\d+\.", "", name).rpartition(".")
    return part, kind


def source_of(name: str, norm_placement: str = "pre") -> str:
    if name in WHOLE:
        return WHOLE[name]
    part, kind = part_of(name)
    source = FFN_NORM[norm_placement] if part == "ffn_norm" else PARTS[part]
    return f"model.layers.{name.split('.')[1]}.{source}.{kind}"
