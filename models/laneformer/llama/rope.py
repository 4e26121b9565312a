"""Rotary embedding of a `config.json`, in both spellings, for all layers or by kind of layer.

The formulas are those of Transformers' modeling_rope_utils.py, each step rounded to float32 as there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..ropes import LLAMA3_KEYS, YARN_NUMBERS, Rope, float32, plain, wavelengths, yarn

KINDS = ("full_attention", "sliding_attention")
PLAIN = {
    "rope_theta",
    "rope_type",
    "type",
    "partial_rotary_factor",
    "original_max_position_embeddings",
}
KEYS = {  # that a type reads
    "default": set(),
    "llama3": set(LLAMA3_KEYS),
    "linear": {"factor"},
    "yarn": {*YARN_NUMBERS, "truncate"},
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor"},
}
IGNORED = {"max_position_embeddings", "llama_4_scaling_beta"}  # the latter is query_growth


def rope_fields(
    read: Mapping[str, Any], head_dim: int, by_kind: Mapping[str, float]
) -> dict[str, Any]:
    """Return a config's `rope_theta` and `rope_scaling`, or its variant's `ropes` where those do not suffice.

    Args:
        by_kind: Bases of the kinds of layers, where a family has RoPE by kind.
    """
    parameters = read["rope_scaling"] or read["rope_parameters"] or {}
    nested = any(isinstance(parameters.get(kind), Mapping) for kind in KINDS)
    if nested and not by_kind:
        raise ValueError(
            f"RoPE by kind of layer, {parameters}, is not supported for this model_type"
        )
    kinds = (
        {kind: parameters.get(kind) or {} for kind in KINDS}
        if nested
        else {KINDS[0]: parameters, KINDS[1]: {}}
    )
    full = complete(kinds[KINDS[0]], read, read.get("rope_theta") or by_kind.get(KINDS[0], 10000.0))
    if by_kind:
        # layers with a window have a base of their own
        local = read.get("rope_local_base_freq") or by_kind[KINDS[1]] or full["rope_theta"]
        sliding = complete(kinds[KINDS[1]], read, local)
        return {"ropes": tuple(rope_of(kind, read, head_dim) for kind in (full, sliding))}
    # what a LaneformerConfig expresses without ropes
    plain = full["partial_rotary_factor"] == 1.0 and not full.get("llama_4_scaling_beta")
    if plain and full["rope_type"] in ("default", "llama3"):
        scaling = {name: full[name] for name in LLAMA3_KEYS if full.get(name) is not None}
        return {
            "rope_theta": full["rope_theta"],
            "rope_scaling": scaling if full["rope_type"] == "llama3" else None,
        }
    return {"ropes": (rope_of(full, read, head_dim),)}


def complete(
    parameters: Mapping[str, Any], read: Mapping[str, Any], theta: float
) -> dict[str, Any]:
    """Return one kind's parameters with base, type and share of rotated pairs.

    Raises:
        ValueError: The type or another key is unknown.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    # other names of LongRoPE in config.json
    kind = "longrope" if kind == "su" or (kind == "yarn" and "long_factor" in parameters) else kind
    unknown_values = (
        {key: v for key, v in parameters.items() if v is not None}
        if kind not in KEYS
        else {
            key: v
            for key, v in parameters.items()
            if key not in PLAIN | KEYS[kind] | IGNORED and v is not None
        }
    )
    # a key that the type does not read may change the rotation
    if kind not in KEYS or unknown_values:
        raise ValueError(
            f"RoPE of the kind {dict(parameters)} is not supported; supported are the types {', '.join(KEYS)}"
        )
    share = parameters.get("partial_rotary_factor", read.get("partial_rotary_factor") or 1.0)
    return {
        **parameters,
        "rope_type": kind,
        "rope_theta": parameters.get("rope_theta") or theta,
        "partial_rotary_factor": share,
    }


def rope_of(parameters: Mapping[str, Any], read: Mapping[str, Any], head_dim: int) -> Rope:
    rotated = int(head_dim * parameters["partial_rotary_factor"])
    trained = read.get("original_max_position_embeddings") or parameters.get(
        "original_max_position_embeddings"
    )
    trained = trained or read["max_position_embeddings"]
    factor = parameters.get("factor") or read["max_position_embeddings"] / trained
    if parameters["rope_type"] == "yarn":
        return yarn({**parameters, "factor": factor}, parameters["rope_theta"], rotated, trained)
    if parameters["rope_type"] == "longrope":
        return longrope(
            parameters,
            np.array(wavelengths(parameters["rope_theta"], rotated), np.float32),
            trained,
            factor,
        )
    if parameters["rope_type"] == "llama3":
        raise ValueError(
            "rope_type 'llama3' is supported for all layers and all pairs of a head alone"
        )
    factor = factor if parameters["rope_type"] == "linear" else 1
    return Rope(
        tuple(
            float32(frequency / float32(factor))
            for frequency in plain(parameters["rope_theta"], rotated).frequencies
        )
    )


def longrope(
    parameters: Mapping[str, Any], wavelength: np.ndarray, trained: int, factor: float
) -> Rope:
    """Return LongRoPE (arXiv 2402.13753): each wavelength times a factor of its own.

    Short factors serve a context within the trained length.
    """
    scale = parameters.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    factors = [
        np.asarray(parameters.get(f"{name}_factor") or (), np.float32) for name in ("long", "short")
    ]
    for values in factors:
        if len(values) != len(wavelength):
            raise ValueError(
                f"long_factor and short_factor hold {[len(f) for f in factors]} numbers; {len(wavelength)} pairs rotate"
            )
    # Transformers chooses by the length of the text so far; here, as in llama.cpp and vLLM, the
    # context decides
    long, short = (
        tuple((1 / (values * wavelength)).astype(np.float32).tolist()) for values in factors
    )
    return Rope(long, float(scale), short, trained)
