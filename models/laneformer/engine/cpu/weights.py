"""Pass tensors one at a time to the C++ core, which packs them into tapes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...config import EMBEDDING, HEAD_NORMS, MATRICES, MTP, NORMS, LaneformerConfig
from ...llama.variant import POST_NORMS, ROUTER, variant_of
from ...tensors import FIRST_MATRIX, Tensor, type_of
from ..folder import query_scales, rope_tables
from . import _core
from .spec import head_of


def load_vectors(
    decoder: _core.Decoder, config: LaneformerConfig, tensors: Mapping[str, Tensor]
) -> None:
    """Set rotary tables, norms and biases; ValueError names the first tensor that is not finite."""
    decoder.set_rope(*rope_tables(config))
    if (scales := query_scales(config)) is not None:
        decoder.set_query_scales(scales)
    layers, shapes = layer_prefixes(config), config.tensor_shapes()
    heads_own = ("hidden_norm", "embedding_norm", "norm") if config.num_nextn_predict_layers else ()
    # the core's order; a norm that this model lacks keeps its index
    norms = [f"{layer}{norm}.weight" for layer in layers for norm in NORMS]
    norms += ["norm.weight", *(f"{MTP}{norm}.weight" for norm in heads_own)]
    norms += [f"{layer}{norm}.weight" for layer in layers for norm in POST_NORMS]
    for index, name in enumerate(norms):
        if name in shapes:
            send(tensors, name, decoder.set_norm, index)
    for i, layer in enumerate(layers):
        for matrix in (*MATRICES, ROUTER):
            if (bias := f"{layer}{matrix}.bias") in shapes:
                send(tensors, bias, decoder.set_bias, matrix.split(".")[1], i)
        if variant_of(config).attention_sinks:
            send(tensors, f"{layer}attention.sinks.weight", decoder.set_bias, "sinks", i)
        for norm in HEAD_NORMS if config.qk_norm else ():
            send(tensors, f"{layer}{norm}.weight", decoder.set_head_norm, norm.split(".")[1], i)


def load_matrices(
    decoder: _core.Decoder, config: LaneformerConfig, tensors: Mapping[str, Tensor]
) -> None:
    """Pack the embedding and all matrices; ValueError names the first tensor that is not finite."""
    if not config.tie_word_embeddings:
        send(tensors, EMBEDDING, decoder.set_embedding)
    names = (*MATRICES, ROUTER) if variant_of(config).experts else MATRICES
    matrices = [
        (f"{layer}{name}.weight", name.split(".")[1], i)
        for i, layer in enumerate(layer_prefixes(config))
        for name in names
    ]
    for name, part, layer in [*matrices, (head_of(config), "lm_head", 0)]:
        in_blocks = type_of(tensors, name) in _core.BLOCKS
        send(tensors, name, decoder.set_blocks if in_blocks else decoder.set_matrix, part, layer)


def send(
    tensors: Mapping[str, Tensor], name: str, setter: Callable[..., bool], *where: Any
) -> None:
    tensor = tensors[name]
    if not setter(*where, np.ascontiguousarray(tensor.values), tensor.dtype):
        raise ValueError(
            f"tensor {name} holds values that are not finite (NaN, or too large for the dtype)"
        )


def layer_prefixes(config: LaneformerConfig) -> list[str]:
    """Return the name prefixes of the layers; the drafting head's block is the last."""
    layers = [f"layers.{i}." for i in range(config.num_hidden_layers)]
    return [*layers, f"{MTP}layer."] if config.num_nextn_predict_layers else layers


def check_dtypes(config: LaneformerConfig, tensors: Mapping[str, Tensor], dtype: str) -> None:
    """Raise ValueError where layers' dtypes differ; warn where head or embedding lose digits."""
    exempt_names = (EMBEDDING, head_of(config))
    matrices = tuple(f"{matrix}.weight" for matrix in MATRICES)
    for name in config.tensor_shapes():
        if name not in exempt_names and not name.endswith(matrices):
            continue
        tensor_dtype = type_of(tensors, name)
        if tensor_dtype != dtype and name not in exempt_names:
            raise ValueError(
                f"dtype = 'auto': {name} is {tensor_dtype} and {FIRST_MATRIX} is {dtype}; choose a dtype"
            )
        if tensor_dtype != dtype != "fp32":
            warnings.warn(
                f"{name} is {tensor_dtype} and becomes {dtype}, the layers' dtype; or choose 'fp32'",
                stacklevel=2,
            )
