"""Read another family's `config.json` as a LaneformerConfig with delay 0, or refuse it by key.

families.py has the table of families.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from ..config import LaneformerConfig
from .families import (
    ACCEPTED,
    BY_NAME,
    FAMILIES,
    HARMLESS,
    MEANINGS,
    OPTIONAL,
    SIZES,
    SUPPORTED,
    TEXT_OF,
    Family,
)
from .rope import rope_fields
from .variant import Experts, FamilyConfig, Variant

BLOCK = 32  # inputs that share a scale in MXFP4
MAX_GPU_LANES = 8  # as `2b` has: 16 multiprocessors of an H200 to each


def config_of_llama(values: Mapping[str, Any], lanes: int) -> LaneformerConfig:
    """Return the architecture on `lanes` lanes; raise ValueError for what is not supported."""
    try:
        return translate(values, lanes)
    except TypeError as error:
        raise ValueError(f"config.json holds a value of the wrong type: {error}") from None


def translate(values: Mapping[str, Any], lanes: int) -> LaneformerConfig:
    values = text_values(values)
    family = family_of(values)
    read = {**OPTIONAL, **family.optional, **values}
    missing = [name for name in SIZES if read.get(name) is None]
    if missing:
        raise ValueError(f"config.json lacks {missing}")
    layers = range(read["num_hidden_layers"])
    nope = layers_without_rope(read, layers) if "no_rope_layers" in family.optional else ()
    window, windowed = windows(read, family, layers, nope)
    fields: dict[str, Any] = dict(
        {name: read[family.width if name == "intermediate_size" else name] for name in SIZES},
        num_key_value_heads=read["num_key_value_heads"] or read["num_attention_heads"],
        head_dim=read["head_dim"],
        num_lanes=lanes,
        broadcast_delay=0,
        sliding_window=window or read["max_position_embeddings"],
        swa_layers=windowed,
        lm_head_type="replicate" if read["vocab_size"] % lanes else "vocab_parallel",
        # Granite adds r times a module's output: its streams are held divided by r, which a norm
        # undoes
        norm_eps=read["rms_norm_eps"] / read.get("residual_multiplier", 1.0) ** 2,
        initializer_range=read["initializer_range"],
        tie_word_embeddings=bool(read["tie_word_embeddings"]),
        attention_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        nope_layers=nope,
    )
    config = LaneformerConfig(**fields)
    rope = rope_fields(read, config.head_dim, family.ropes)
    variant = Variant(
        **family.variant,
        ropes=rope.pop("ropes", ()),
        experts=experts(read, family.interleaved),
        **scales(read),
    )
    if not variant.differences():
        return dataclasses.replace(config, **rope)
    return FamilyConfig(**fields | rope, variant=variant)


def text_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the text model alone, where a vision tower stands beside it."""
    family, text = TEXT_OF.get(values.get("model_type", "")), values.get("text_config")
    if family is None or not isinstance(text, Mapping):
        return values
    # may be in the outer config alone
    outer = {"tie_word_embeddings"} & values.keys() - text.keys()
    return {
        "model_type": family,
        **text,
        **{name: values[name] for name in outer},
        "architectures": None,
    }


def experts(read: Mapping[str, Any], biased: bool) -> Experts | None:
    if "num_experts_per_tok" not in read:
        return None
    total = read["num_experts"] or read["num_local_experts"]
    # gpt-oss's weights are a softmax of the chosen scores
    return Experts(
        total, read["num_experts_per_tok"], bool(read.get("norm_topk_prob", True)), biased
    )


def scales(read: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if "embedding_multiplier" in read:
        values["embedding_scale"] = read["embedding_multiplier"] / read["residual_multiplier"]
        values["attention_scale"] = read["attention_multiplier"]
    if "query_pre_attn_scalar" in read:
        values["embedding_scale"] = read["hidden_size"] ** 0.5
        values["attention_scale"] = read["query_pre_attn_scalar"] ** -0.5
    rope = read["rope_scaling"] or read["rope_parameters"] or {}
    if grows := rope.get("llama_4_scaling_beta"):
        values["query_growth"] = grows, rope["original_max_position_embeddings"]
    return values


def lanes_for(values: Mapping[str, Any], threads: int) -> int:
    """Return the lanes for a model that has none of its own."""
    family = family_named(values)
    # a joint norm is over all heads, so they stay on one lane
    if family.variant.get("joint_qk_norm"):
        return 1
    heads = shared_sizes(values, ("num_attention_heads", "num_key_value_heads"))
    rows = shared_sizes(values, (family.width,))
    if family.interleaved:
        # lanes do not cut blocks
        rows = [size // BLOCK if size % BLOCK == 0 else size for size in rows]
    # one lane a thread, or fewer lanes with a group of threads each
    return math.gcd(threads, *heads, *rows)


def lanes_for_gpus(values: Mapping[str, Any], gpus: int) -> int:
    """Return the most lanes that GPUs share evenly, with whole heads, MLP and vocabulary rows."""
    shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    sizes = shared_sizes(values, shared)
    # many lanes have short exchanges
    return max(
        (n for n in range(gpus, MAX_GPU_LANES + 1, gpus) if all(s % n == 0 for s in sizes)),
        default=gpus,
    )


def family_named(values: Mapping[str, Any]) -> Family:
    # an unknown family is refused later
    return FAMILIES.get(str(text_values(values).get("model_type")), FAMILIES["llama"])


def shared_sizes(values: Mapping[str, Any], names: tuple[str, ...]) -> list[int]:
    read = {**family_named(values).optional, **text_values(values)}
    return [read[name] for name in names if isinstance(read.get(name), int)]


def family_of(values: Mapping[str, Any]) -> Family:
    name = values.get("model_type")
    if name not in FAMILIES:
        raise ValueError(
            f"model_type = {name!r} is not supported{why_not(str(name), (*FAMILIES, *TEXT_OF), values)}; "
            f"supported are folders of this project, and {SUPPORTED}"
        )
    family = FAMILIES[name]
    class_names = values.get("architectures") or family.architectures
    if not set(class_names) & set(family.architectures):
        raise ValueError(
            f"architectures = {class_names} is not supported; only {' or '.join(family.architectures)}"
        )
    for key, value in values.items():
        check_key(key, value, family)
    return family


def check_key(key: str, value: Any, family: Family) -> None:
    if key == "quantization_config" and key in family.optional and value:
        method = value.get("quant_method") if isinstance(value, Mapping) else value
        if method != "mxfp4":
            raise ValueError(
                f"config.json: {key} has quant_method {method!r}; supported is 'mxfp4' alone"
            )
    read_keys = OPTIONAL | family.optional
    if isinstance(value, str) and (key in SIZES or isinstance(read_keys.get(key), int | float)):
        raise ValueError(f"config.json: {key} = {value!r} must be a number, without quotes")
    if key in SIZES or key in read_keys or key in HARMLESS or key.startswith("_"):
        return
    accepted = ACCEPTED | family.accepted
    if value is None or value in accepted.get(key, ()):
        return
    # a key that is neither read nor harmless may change what the model computes
    meaning = meaning_of(key)
    only = f"; only {' or '.join(map(repr, accepted[key]))}" if key in accepted else ""
    raise ValueError(
        f"config.json: {key} = {value!r} is not supported"
        + (f" ({meaning})" if meaning else "")
        + only
        + ("" if only else f"; it may change what the model computes. Supported is {SUPPORTED}")
    )


def why_not(name: str, supported_names: Iterable[str], values: Mapping[str, Any]) -> str:
    text = values.get("text_config")
    fields = {**values, **text} if isinstance(text, Mapping) else values
    reasons = set(filter(None, (meaning_of(key) for key, value in fields.items() if value)))
    reasons |= {
        meaning for start, meaning in BY_NAME.items() if name.replace("_", "").startswith(start)
    }
    near = difflib.get_close_matches(name.removesuffix("_text"), supported_names, n=1)
    why = f" ({', '.join(sorted(reasons))})" if reasons else ""
    return why + (f"; the nearest that is: {near[0]!r}" if near else "")


def meaning_of(key: str) -> str | None:
    return next((meaning for part, meaning in MEANINGS.items() if part in key), None)


def windows(
    read: Mapping[str, Any], family: Family, layers: range, nope: tuple[int, ...]
) -> tuple[int | None, tuple[int, ...]]:
    """Return the sliding window (None: there is none) and the layers that have it."""
    window = (
        read["sliding_window"]
        if read.get("use_sliding_window", True) and "sliding_window" in read
        else None
    )
    types = read["layer_types"]
    if types is not None:
        unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
        if unknown or len(types) != len(layers):
            raise ValueError(
                f"layer_types holds {unknown or f'{len(types)} entries for {len(layers)} layers'}; supported are "
                "'full_attention' and 'sliding_attention', one for each layer"
            )
        windowed = tuple(i for i in layers if types[i] == "sliding_attention")
    elif family.windowed == "later":
        # layers from this one on have the window
        windowed = tuple(layers[read["max_window_layers"] :])
    elif isinstance(family.windowed, int):
        # each `every`-th layer sees everything
        full_interval = read.get("sliding_window_pattern") or family.windowed
        windowed = tuple(i for i in layers if (i + 1) % full_interval)
    else:
        windowed = nope if family.windowed == "nope" else tuple(layers)
    # Transformers does not look at layer_types
    ignores_layer_types = read["model_type"] in ("mistral", "ministral3", "phi3", "qwen3_moe")
    if ignores_layer_types and window and windowed != tuple(layers):
        raise ValueError(
            f"layer_types of model_type {read['model_type']!r} must all be 'sliding_attention', "
            "as Transformers computes"
        )
    return window, windowed if window else ()


def layers_without_rope(read: Mapping[str, Any], layers: range) -> tuple[int, ...]:
    has_rope, interval = read["no_rope_layers"], read["no_rope_layer_interval"]
    # `no_rope_layers` is 1 where a layer has RoPE
    if has_rope is None:
        return tuple(layers[interval - 1 :: interval])
    return tuple(i for i in layers if not has_rope[i])
