"""Read a GGUF file's fields as the config.json that Transformers would write.

Fields that a file leaves out have the values that llama.cpp assumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gguf import ReaderTensor

ARCHITECTURES = {  # model_type in Transformers; Mistral and SmolLM come as llama, OLMo 3 as olmo2
    "llama": "llama",
    "smollm3": "smollm3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "olmo2": "olmo2",
    "granite": "granite",
    "phi3": "phi3",
    "gemma3": "gemma3_text",
    "mistral3": "ministral3",
    "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
}
ROPE_FACTORS = "rope_freqs.weight"
LONGROPE = {name: f"rope_factors_{name}.weight" for name in ("long", "short")}


KNOWN = {  # values that change nothing, or that other fields say as well; None: any value
    "vocab_size": None,
    "tensor_data_layout": None,
    "pooling_type": None,
    "attention.layer_norm_epsilon": None,
    "attention.causal": (True,),
    "rope.scaling.finetuned": None,
    "rope.scaling.original_context_length": None,
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_beta_fast": None,
    "rope.scaling.yarn_beta_slow": None,
    "attention.temperature_length": None,
    "expert_used_count": None,
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1, 3),
    "interleave_moe_layer_step": (0, 1),
}
OTHER_TOWER = ("vision.", "mm.")  # beginnings of fields


class Fields:
    """The architecture's fields, by names without its own in front, with a record of those read."""

    def __init__(self, metadata: Mapping[str, Any]):
        self.architecture = str(metadata["general.architecture"])
        prefix = f"{self.architecture}."
        self.values = {
            k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)
        }
        self.read: set[str] = set()

    def of_layers(self, key: str) -> Any:
        self.read.add(key)
        return self.values.get(key)

    def __call__(self, key: str, default: Any = None) -> Any:
        value = self.of_layers(key)
        if isinstance(value, list):
            if len(set(value)) > 1:
                raise ValueError(
                    f"{self.architecture}.{key} differs between layers, which is not supported"
                )
            value = value[0]
        return default if value is None else value

    def require(self, key: str) -> Any:
        if (value := self(key)) is None:
            raise ValueError(f"the file lacks {self.architecture}.{key}")
        if isinstance(value, str | bool):
            raise ValueError(f"{self.architecture}.{key} = {value!r} must be a number")
        return value

    def refuse_unread(self) -> None:
        for key, value in self.values.items():
            if key in self.read or key.startswith(OTHER_TOWER):
                continue
            # an unknown field is refused unless it is zero or empty
            is_empty = not any(value) if isinstance(value, list) else not value
            allowed = KNOWN.get(key, () if not is_empty else None)
            if allowed is not None and value not in allowed:
                raise ValueError(
                    f"{self.architecture}.{key} = {value!r:.60} is not supported; it may change what the model computes"
                )


def config_values(
    metadata: Mapping[str, Any], stored: Mapping[str, ReaderTensor]
) -> dict[str, Any]:
    field = Fields(metadata)
    has_experts = field.architecture in ("qwen3moe", "gpt-oss")
    if field("expert_count") and not has_experts:
        raise ValueError(
            f"{field.architecture}.expert_count = {field('expert_count')}: experts are not supported"
        )
    if "model.embed_tokens.weight" not in stored:
        raise ValueError("the file lacks the tensor token_embd.weight")
    heads, hidden = field.require("attention.head_count"), field.require("embedding_length")
    partial = field.architecture == "phi3"
    rotated_dim = field("rope.dimension_count") or hidden // heads
    head_dim = field("attention.key_length", hidden // heads if partial else rotated_dim)
    same = ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa")
    # keys and values of heads have one size; Phi-3's heads alone may rotate in part
    for key in (*same, *(() if partial else ("rope.dimension_count", "rope.dimension_count_swa"))):
        if field(key, head_dim) != head_dim:
            raise ValueError(
                f"{field.architecture}.{key} = {field(key)}, but heads have {head_dim}: not supported"
            )
    theta = field("rope.freq_base", 10000.0)
    if field.architecture != "gemma3" and field("rope.freq_base_swa", theta) != theta:
        raise ValueError(
            f"{field.architecture}.rope.freq_base_swa is not rope.freq_base = {theta}: not supported"
        )
    window = field.of_layers("attention.sliding_window") or None
    if window and field.architecture in ("qwen2", "qwen3", "qwen3moe", "smollm3", "granite"):
        raise ValueError(
            f"{field.architecture}.attention.sliding_window = {window}: which layers, it does not say"
        )
    values = {
        "model_type": model_type(field, window),
        "hidden_size": hidden,
        "intermediate_size": (field if has_experts else field.require)("feed_forward_length"),
        "num_hidden_layers": field.require("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": field.require("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": rope_scaling(field, stored, head_dim),
        "max_position_embeddings": field.require("context_length"),
        "vocab_size": int(stored["model.embed_tokens.weight"].shape[1]),
        # a file without a head uses the embedding
        "tie_word_embeddings": "lm_head.weight" not in stored,
        "sliding_window": window,
        "layer_types": layer_types(field),
        **own_values(field, head_dim, rotated_dim),
    }
    field.refuse_unread()
    return values


def layer_types(field: Fields) -> list[str] | None:
    """Return the kind of each layer; None where the architecture decides."""
    pattern = field.of_layers("attention.sliding_window_pattern")
    if pattern is None:
        return None
    # n: all but each n-th layer have a window
    if not isinstance(pattern, list):
        pattern = [(i + 1) % pattern for i in range(field.require("block_count"))]
    return [("full_attention", "sliding_attention")[bool(is_local)] for is_local in pattern]


def model_type(field: Fields, window: int | None) -> str:
    # the model_type that has a window
    with_window = {"llama": "mistral", "olmo2": "olmo3"} if window else {}
    yarn = field("rope.scaling.type") is not None
    plain = {} if yarn else {"mistral3": "mistral"}
    return {**ARCHITECTURES, **with_window, **plain}[field.architecture]


OWN = {  # keys of config.json that an architecture has beside, by its fields
    "granite": {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    },
    "qwen3moe": {
        "moe_intermediate_size": "expert_feed_forward_length",
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
    },
    "gpt-oss": {
        "intermediate_size": "expert_feed_forward_length",
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
    },
    "phi3": {"original_max_position_embeddings": "rope.scaling.original_context_length"},
    "gemma3": {
        "rope_local_base_freq": "rope.freq_base_swa",
        "final_logit_softcapping": "final_logit_softcapping",
    },
}


def own_values(field: Fields, head_dim: int, rotated_dim: int) -> dict[str, Any]:
    values = {name: field(key) for name, key in OWN.get(field.architecture, {}).items()}
    if field.architecture == "granite":
        defaults = {"attention_multiplier": head_dim**-0.5}
        return {name: value or defaults.get(name, 1.0) for name, value in values.items()}
    if field.architecture == "gemma3":
        of_27b = field("block_count") == 62
        values["query_pre_attn_scalar"] = (
            field("embedding_length") // field("attention.head_count") if of_27b else head_dim
        )
        values["rope_local_base_freq"] = values["rope_local_base_freq"] or 10000.0
    if field.architecture == "qwen3moe":  # llama.cpp always divides by the weights' sum
        values["norm_topk_prob"] = True
    if field.architecture == "phi3":
        values["partial_rotary_factor"] = rotated_dim / head_dim
    return values


def rope_scaling(
    field: Fields, stored: Mapping[str, ReaderTensor], head_dim: int
) -> dict[str, Any] | None:
    # files of 2023 have another name for the factor, and no type
    factor = field("rope.scale_linear", 0.0)
    factor = field("rope.scaling.factor", factor) or 1.0
    kind = field("rope.scaling.type", "none" if factor == 1.0 else "linear")
    if kind == "yarn":
        return yarn(field)
    if kind not in ("none", "longrope"):
        if ROPE_FACTORS in stored:
            raise ValueError(f"RoPE scaling {kind!r} with {ROPE_FACTORS} is not supported")
        return {"rope_type": kind, "factor": factor}
    if all(name in stored for name in LONGROPE.values()):
        factors = {f"{name}_factor": stored[of].data.tolist() for name, of in LONGROPE.items()}
        return {
            "rope_type": "longrope",
            "attention_factor": field("rope.scaling.attn_factor"),
            **factors,
        }
    if ROPE_FACTORS not in stored:
        return None
    # of Llama 3's scaling the file has only the divisor of each frequency
    divisors = np.asarray(stored[ROPE_FACTORS].data, np.float64)
    factor, low, high = float(divisors.max()), 1.0, 4.0
    frequency = field("rope.freq_base", 10000.0) ** -(np.arange(0, head_dim, 2) / head_dim)
    # search the trained length whose formula gives these divisors
    for length in (8192, field("rope.scaling.original_context_length", 8192)):
        blend = ((length * frequency / (2 * np.pi) - low) / (high - low)).clip(0, 1)
        if divisors.shape == blend.shape and np.allclose(
            divisors, 1 / (blend + (1 - blend) / factor), rtol=1e-4
        ):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": length,
            }
    raise ValueError(
        f"{ROPE_FACTORS} is no scaling of Llama 3 (from 8,192 positions, factors 1 and 4): not supported"
    )


def yarn(field: Fields) -> dict[str, Any]:
    keys = {
        "factor": "factor",
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    values = {name: field(f"rope.scaling.{key}") for name, key in keys.items()}
    if field("rope.scaling.yarn_log_multiplier"):
        values |= {"mscale": 1.0, "mscale_all_dim": field("rope.scaling.yarn_log_multiplier")}
    if field.architecture == "gpt-oss":  # which the file does not say
        values["truncate"] = False
    return {
        "rope_type": "yarn",
        **values,
        "llama_4_scaling_beta": field("attention.temperature_scale"),
    }
