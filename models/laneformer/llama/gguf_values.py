"""What a GGUF file says of its model, as the config.json that Transformers would write.

Of what a file leaves out, the values are those that llama.cpp assumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gguf import ReaderTensor

ARCHITECTURES = {  # model_type in Transformers; Mistral and SmolLM come as llama, OLMo 3 as olmo2
    "llama": "llama", "smollm3": "smollm3", "qwen2": "qwen2", "qwen3": "qwen3", "olmo2": "olmo2", "granite": "granite",
    "phi3": "phi3", "gemma3": "gemma3_text", "mistral3": "ministral3", "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
}  # fmt: skip
ROPE_FACTORS = "rope_freqs.weight"
LONGROPE = {name: f"rope_factors_{name}.weight" for name in ("long", "short")}


class Fields:
    """The architecture's fields, by names without its own in front."""

    def __init__(self, metadata: Mapping[str, Any]):
        self.architecture, self.metadata = str(metadata["general.architecture"]), metadata

    def of_layers(self, key: str) -> Any:
        """As it stands there, which may be a list with a value a layer."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def __call__(self, key: str, default: Any = None) -> Any:
        value = self.of_layers(key)
        if isinstance(value, list):
            if len(set(value)) > 1:
                raise ValueError(f"{self.architecture}.{key} differs between layers, which is not supported")
            value = value[0]
        return default if value is None else value


def config_values(
    metadata: Mapping[str, Any], stored: Mapping[str, ReaderTensor], eos_ids: list[int]
) -> dict[str, Any]:
    """The model's config.json, as Transformers would write it."""
    field = Fields(metadata)

    if field("expert_count") and field.architecture not in ("qwen3moe", "gpt-oss"):
        raise ValueError(
            f"{field.architecture}.expert_count = {field('expert_count')}: experts are not supported"
        )
    heads, hidden = field("attention.head_count"), field("embedding_length")
    partial = field.architecture == "phi3"
    rotated = field("rope.dimension_count") or hidden // heads
    head_dim = field("attention.key_length", hidden // heads if partial else rotated)
    for key in ("attention.value_length", "rope.dimension_count")[: 1 if partial else 2]:
        if field(key, head_dim) != head_dim:
            raise ValueError(
                f"{field.architecture}.{key} = {field(key)}, but heads have {head_dim}: not supported"
            )
    window = field.of_layers("attention.sliding_window") or None
    if window and field.architecture in ("qwen2", "qwen3", "qwen3moe", "smollm3", "granite"):
        raise ValueError(
            f"{field.architecture}.attention.sliding_window = {window}: which layers, it does not say"
        )
    return {
        "model_type": model_type(field, window),
        "hidden_size": hidden,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "rope_theta": field("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(field, stored, head_dim),
        "max_position_embeddings": field("context_length"),
        "vocab_size": int(stored["model.embed_tokens.weight"].shape[1]),
        "tie_word_embeddings": "lm_head.weight" not in stored,
        "sliding_window": window,
        "eos_token_id": eos_ids,
        **own_values(field, head_dim, rotated),
    }


def model_type(field: Fields, window: int | None) -> str:
    with_window = {"llama": "mistral", "olmo2": "olmo3"} if window else {}
    yarn = field("rope.scaling.type") is not None
    plain = {} if yarn else {"mistral3": "mistral"}
    return {**ARCHITECTURES, **with_window, **plain}[field.architecture]


def own_values(field: Fields, head_dim: int, rotated: int) -> dict[str, Any]:
    """What an architecture's config.json has beside; of what the file leaves out, what llama.cpp assumes."""
    pattern = field.of_layers("attention.sliding_window_pattern")
    types = None
    if isinstance(pattern, list):
        types = [("full_attention", "sliding_attention")[bool(is_local)] for is_local in pattern]
    if field.architecture == "olmo2":
        return {"layer_types": types}
    if field.architecture == "gemma3":
        of_27b = field("embedding_length") // field("attention.head_count")
        return {
            "query_pre_attn_scalar": of_27b if field("block_count") == 62 else head_dim,
            "rope_local_base_freq": field("rope.freq_base_swa", 10000.0), "layer_types": types,
            "final_logit_softcapping": field("final_logit_softcapping"),
        }  # fmt: skip
    if field.architecture == "granite":
        names = {"embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale",
                 "attention_multiplier": "attention.scale", "logits_scaling": "logit_scale"}  # fmt: skip
        default = {"attention_multiplier": head_dim**-0.5}
        return {name: field(key) or default.get(name, 1.0) for name, key in names.items()}
    if field.architecture == "qwen3moe":  # llama.cpp always divides by the weights' sum
        names = {"moe_intermediate_size": "expert_feed_forward_length", "num_experts": "expert_count",
                 "num_experts_per_tok": "expert_used_count"}  # fmt: skip
        return {"norm_topk_prob": True, **{name: field(key) for name, key in names.items()}}
    if field.architecture == "gpt-oss":
        names = {"intermediate_size": "expert_feed_forward_length", "num_local_experts": "expert_count",
                 "num_experts_per_tok": "expert_used_count"}  # fmt: skip
        return {name: field(key) for name, key in names.items()}
    if field.architecture == "phi3":
        length = field("rope.scaling.original_context_length")
        return {"partial_rotary_factor": rotated / head_dim, "original_max_position_embeddings": length}
    return {}


def rope_scaling(field: Fields, stored: Mapping[str, ReaderTensor], head_dim: int) -> dict[str, Any] | None:
    """Llama 3's scaling, of which the file holds only the divisor of each frequency; other kinds by name."""
    kind = field("rope.scaling.type", "none")
    if kind == "yarn":
        return yarn(field)
    if kind not in ("none", "longrope"):
        return {"rope_type": kind, "factor": field("rope.scaling.factor", 1.0)}
    if all(name in stored for name in LONGROPE.values()):
        factors = {f"{name}_factor": stored[of].data.tolist() for name, of in LONGROPE.items()}
        return {"rope_type": "longrope", "attention_factor": field("rope.scaling.attn_factor"), **factors}
    if ROPE_FACTORS not in stored:
        return None
    divisors = np.asarray(stored[ROPE_FACTORS].data, np.float64)
    factor, low, high = float(divisors.max()), 1.0, 4.0
    frequency = field("rope.freq_base", 10000.0) ** -(np.arange(0, head_dim, 2) / head_dim)
    for length in (8192, field("rope.scaling.original_context_length", 8192)):
        blend = ((length * frequency / (2 * np.pi) - low) / (high - low)).clip(0, 1)
        if divisors.shape == blend.shape and np.allclose(
            divisors, 1 / (blend + (1 - blend) / factor), rtol=1e-4
        ):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": length,
            }  # fmt: skip
    raise ValueError(
        f"{ROPE_FACTORS} is no scaling of Llama 3 (from 8,192 positions, factors 1 and 4): not supported"
    )


def yarn(field: Fields) -> dict[str, Any]:
    keys = {"factor": "factor", "original_max_position_embeddings": "original_context_length",
            "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}  # fmt: skip
    values = {name: field(f"rope.scaling.{key}") for name, key in keys.items()}
    if field("rope.scaling.yarn_log_multiplier"):
        values |= {"mscale": 1.0, "mscale_all_dim": field("rope.scaling.yarn_log_multiplier")}
    if field.architecture == "gpt-oss":  # which the file does not say
        values["truncate"] = False
    return {"rope_type": "yarn", **values, "llama_4_scaling_beta": field("attention.temperature_scale")}
