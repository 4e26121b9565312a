"""Convert a config to the fields and matrix types of the C++ core (csrc/model.h)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...config import BIASED, DRAFT_IDS, EMBEDDING, HEAD, LM_HEAD_TYPES, MATRICES, LaneformerConfig
from ...joins import MODULES
from ...llama.variant import GATES, variant_of
from ...tensors import Tensor, type_of
from . import _core

GROUP_INPUTS = 32  # inputs of a block that share a scale
EXPERTS = ("experts", "active", "normed_weights", "expert_bias")  # in the core's words


def choose_types(config: LaneformerConfig, tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the packed types of a GGUF file's matrices: per layer in the order of MATRICES, the head last."""
    shapes = {**config.tensor_shapes(), head_of(config): config.head_shape}

    def type_on_tape(name: str) -> str:
        kind = type_of(tensors, name)
        # the file's own, unless lanes would cut blocks
        if kind in _core.BLOCKS and shapes[name][-1] % GROUP_INPUTS:
            return "int8"
        return _core.BLOCKS.get(kind, kind)

    # w1 and w3 share tiles, and so do queries, keys and values where a lane's rows end within one
    together: list[tuple[str, ...]] = [("feed_forward.w1", "feed_forward.w3")]
    if config.query_size // config.num_lanes % 16 or config.head_dim % 16:
        together.append(BIASED)

    def types_of_layer(i: int) -> list[str]:
        types = {matrix: type_on_tape(f"layers.{i}.{matrix}.weight") for matrix in MATRICES}
        for matrices in together:
            if len({types[matrix] for matrix in matrices}) > 1:
                types |= dict.fromkeys(matrices, "int8")
        return [*types.values(), "int8"]

    head = [type_on_tape(head_of(config))] * (len(MATRICES) + 1)
    return [*map(types_of_layer, range(config.num_hidden_layers)), head]


def head_of(config: LaneformerConfig) -> str:
    """Return the name of the tensor with the head's rows."""
    return EMBEDDING if config.tie_word_embeddings else HEAD


def core_spec(config: LaneformerConfig, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the fields of csrc/model.h, and the ids that can be drafted."""
    # the head that drafts has the layer after the last one
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
