"""A Llama-family `config.json` as a LaneformerConfig with delay 0; what would compute otherwise
is refused by name.

A key is read, or known to change nothing, or refused: a misread key costs an error message, an ignored one a
wrong model. Defaults of keys that a file leaves out are those of the family's config class in Transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import ROPE_SCALING_KEYS, LaneformerConfig

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
         "max_position_embeddings")  # fmt: skip
OPTIONAL: dict[str, Any] = {
    "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6, "initializer_range": 0.02,
    "rope_theta": 10000.0, "rope_scaling": None, "rope_parameters": None, "tie_word_embeddings": False,
    "layer_types": None,
}  # fmt: skip
MAX_GPU_LANES = 8  # as `2b` has: 16 multiprocessors of an H200 to each
QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

SMOLLM3 = {
    "use_sliding_window": False, "sliding_window": None, "no_rope_layers": None, "no_rope_layer_interval": 4,
    "rope_theta": 2000000.0, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """What tells a family from Llama. optional: keys that a file may leave out, with their defaults."""

    architecture: str
    optional: dict[str, Any] = field(default_factory=dict)
    qkv_bias: bool = False
    qk_norm: bool = False


FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", {"sliding_window": 4096}),
    "qwen2": Family("Qwen2ForCausalLM", QWEN_WINDOWS, qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", {**QWEN_WINDOWS, "head_dim": 128}, qk_norm=True),
    "smollm3": Family("SmolLM3ForCausalLM", SMOLLM3),
}
SUPPORTED = (
    f"model_type {', '.join(FAMILIES)}: dense decoders with RoPE (plain or llama3), SwiGLU and RMSNorm, such as Llama "
    "2 and 3, TinyLlama, SmolLM, Mistral 7B, Qwen 2, 2.5 and 3"
)
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,), "use_sliding_window": (False,),
    "partial_rotary_factor": (1.0,), "rope_interleaved": (False,), "use_mrope": (False,), "is_llama_config": (True,),
    "is_decoder": (True, False), "is_encoder_decoder": (False,), "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
}  # fmt: skip
HARMLESS = frozenset({
    "architectures", "model_type", "auto_map", "transformers_version", "torch_dtype", "dtype", "use_cache",
    "attention_dropout", "hidden_dropout", "pretraining_tp", "bos_token_id", "eos_token_id", "pad_token_id",
    "unk_token_id", "sep_token_id", "decoder_start_token_id", "tokenizer_class", "max_window_layers",
    "chunk_size_feed_forward", "output_attentions", "output_hidden_states", "return_dict", "torchscript", "id2label",
    "label2id", "problem_type", "task_specific_params", "finetuning_task", "gradient_checkpointing", "use_bfloat16",
    "transformers.js_config", "unsloth_fixed", "unsloth_version", "attn_implementation", "num_logits_to_keep",
    "ignore_keys_at_rope_validation", "max_length", "do_sample", "temperature", "top_p", "top_k",
})  # fmt: skip
MEANINGS = {
    "expert": "a mixture of experts", "moe": "a mixture of experts", "lora_rank": "multi-head latent attention",
    "linear_": "linear attention", "ssm": "a state space model", "mamba": "a state space model",
    "softcap": "logit soft-capping", "sink": "attention sinks", "parallel": "parallel attention and MLP",
    "quantization": "quantized safetensors (take the original weights, or a GGUF file)",
    "per_layer": "sizes that differ from layer to layer", "bias": "a bias of the output projection or of the MLP",
}  # fmt: skip


def config_of_llama(values: Mapping[str, Any], lanes: int) -> LaneformerConfig:
    """The architecture with its heads and MLP rows on `lanes` lanes. ValueError names what is not supported."""
    try:
        return translated(values, lanes)
    except TypeError as error:
        raise ValueError(f"config.json holds a value of the wrong type: {error}") from None


def translated(values: Mapping[str, Any], lanes: int) -> LaneformerConfig:
    family = family_of(values)
    missing = [name for name in SIZES if values.get(name) is None]
    if missing:
        raise ValueError(f"config.json lacks {missing}")
    read = {**OPTIONAL, **family.optional, **values}
    layers = range(read["num_hidden_layers"])
    nope = layers_without_rope(read, layers) if "no_rope_layers" in family.optional else ()
    window, windowed = windows(read, family, layers, nope)
    theta, scaling = rope(read)
    return LaneformerConfig(
        **{name: read[name] for name in SIZES},
        num_key_value_heads=read["num_key_value_heads"] or read["num_attention_heads"],
        head_dim=read["head_dim"],
        num_lanes=lanes,
        broadcast_delay=0,
        sliding_window=window or read["max_position_embeddings"],
        swa_layers=windowed,
        lm_head_type="replicate" if read["vocab_size"] % lanes else "vocab_parallel",
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=read["rms_norm_eps"],
        initializer_range=read["initializer_range"],
        tie_word_embeddings=bool(read["tie_word_embeddings"]),
        attention_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        nope_layers=nope,
    )


def lanes_for(values: Mapping[str, Any], threads: int) -> int:
    """Lanes for a model that has none of its own: one a thread, or a group of threads for
    each of fewer lanes.
    """
    shared = (
        values.get(name) for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    )
    return math.gcd(threads, *(size for size in shared if isinstance(size, int)))


def lanes_for_gpus(values: Mapping[str, Any], gpus: int) -> int:
    """Lanes that GPUs share evenly, with whole heads, MLP rows and vocabulary rows;
    many, for short exchanges.
    """
    shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    sizes = [size for size in map(values.get, shared) if isinstance(size, int)]
    return max(
        (n for n in range(gpus, MAX_GPU_LANES + 1, gpus) if all(s % n == 0 for s in sizes)), default=gpus
    )


def family_of(values: Mapping[str, Any]) -> Family:
    """The family that `model_type` names, after every key has been looked at."""
    name = values.get("model_type")
    if name not in FAMILIES:
        reasons = {meaning for key, value in values.items() if value and (meaning := meaning_of(key))}
        raise ValueError(
            f"model_type = {name!r} is not supported"
            + (f" ({', '.join(sorted(reasons))})" if reasons else "")
            + f"; supported are folders of this project, and {SUPPORTED}"
        )
    family = FAMILIES[name]
    if family.architecture not in (values.get("architectures") or [family.architecture]):
        raise ValueError(
            f"architectures = {values['architectures']} is not supported; only {family.architecture}"
        )
    for key, value in values.items():
        check_key(key, value, family)
    return family


def check_key(key: str, value: Any, family: Family) -> None:
    if key in SIZES or key in OPTIONAL or key in family.optional or key in HARMLESS or key.startswith("_"):
        return
    if value is None or value in ACCEPTED.get(key, ()):
        return
    meaning = meaning_of(key)
    only = f"; only {' or '.join(map(repr, ACCEPTED[key]))}" if key in ACCEPTED else ""
    raise ValueError(
        f"config.json: {key} = {value!r} is not supported" + (f" ({meaning})" if meaning else "") + only +
        ("" if only else f"; it may change what the model computes. Supported is {SUPPORTED}")
    )  # fmt: skip


def meaning_of(key: str) -> str | None:
    return next((meaning for part, meaning in MEANINGS.items() if part in key), None)


def windows(
    read: Mapping[str, Any], family: Family, layers: range, nope: tuple[int, ...]
) -> tuple[int | None, tuple[int, ...]]:
    """The sliding window (None: there is none) and the layers that have it."""
    window = (
        read["sliding_window"] if read.get("use_sliding_window", True) and "sliding_window" in read else None
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
    elif "max_window_layers" in family.optional:
        windowed = tuple(layers[read["max_window_layers"] :])
    else:
        windowed = nope if family.architecture.startswith("SmolLM3") else tuple(layers)
    if family.architecture.startswith("Mistral") and window and windowed != tuple(layers):
        raise ValueError(
            "layer_types of model_type 'mistral' must all be 'sliding_attention', as Transformers computes"
        )
    return window, windowed if window else ()


def layers_without_rope(read: Mapping[str, Any], layers: range) -> tuple[int, ...]:
    """From `no_rope_layers`, which is 1 where a layer has RoPE, or each `no_rope_layer_interval`-th layer."""
    has_rope, every = read["no_rope_layers"], read["no_rope_layer_interval"]
    if has_rope is None:
        return tuple(layers[every - 1 :: every])
    return tuple(i for i in layers if not has_rope[i])


def rope(read: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base frequency, and the llama3 scaling or None; `rope_parameters` is Transformers 5's name for both."""
    given = read["rope_scaling"] or read["rope_parameters"] or {}
    kind = given.get("rope_type", given.get("type", "default"))
    known = {"rope_theta", "rope_type", "type", "partial_rotary_factor", *ROPE_SCALING_KEYS}
    other = {key: value for key, value in given.items() if key not in known and value is not None}
    if kind not in ("default", "llama3") or other or given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"RoPE of the kind {given} is not supported; supported are plain RoPE and rope_type 'llama3'"
        )
    theta = given.get("rope_theta", read["rope_theta"])
    return theta, {
        name: given[name] for name in ROPE_SCALING_KEYS if name in given
    } if kind == "llama3" else None
