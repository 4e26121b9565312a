"""The other model families: one table, FAMILIES, of their differences from Llama.

A key of a `config.json` is read, or known to change nothing, or refused: a misread key costs an error
message, an ignored one a wrong model. Keys that a file leaves out have the defaults of its class in
Transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
OPTIONAL: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "tie_word_embeddings": False,
    "layer_types": None,
}
QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

SMOLLM3 = {
    "use_sliding_window": False,
    "sliding_window": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "rope_theta": 2000000.0,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Family:
    """Differences of a family from Llama.

    Attributes:
        architectures: Its classes in Transformers.
        optional: Keys that a file may leave out, with their defaults.
        variant: Fields of a LaneformerConfig's variant.
        windowed: Layers with a window where `layer_types` is missing, see `windows`.
        ropes: Bases of full and sliding layers, where they differ.
        norm_offset: Added to norms' weights.
        fused: Whether queries, keys and values are one matrix, gate and up another.
        width: Key with the rows of the MLP, or of each expert.
        accepted: Values that keys may have, in place of ACCEPTED.
        interleaved: Whether experts are stored as gpt-oss's, in blocks that lanes do not cut.
    """

    architectures: tuple[str, ...]
    optional: dict[str, Any] = field(default_factory=dict)
    qkv_bias: bool = False
    qk_norm: bool = False
    variant: dict[str, Any] = field(default_factory=dict)
    windowed: str | int = "all"
    ropes: dict[str, float] = field(default_factory=dict)
    norm_offset: float = 0.0
    fused: bool = False
    width: str = "intermediate_size"
    accepted: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    interleaved: bool = False


OLMO: dict[str, Any] = {"norm_placement": "post", "joint_qk_norm": True}
GEMMA3 = {
    "sliding_window": 4096,
    "sliding_window_pattern": None,
    "query_pre_attn_scalar": 256,
    "head_dim": 256,
    "rope_theta": None,
    "rope_local_base_freq": None,
    "tie_word_embeddings": True,
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
}
GRANITE = {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
PHI3 = {
    "sliding_window": None,
    "original_max_position_embeddings": None,
    "partial_rotary_factor": None,
    "rms_norm_eps": 1e-5,
}
QWEN3_MOE = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "moe_intermediate_size": 768,
    "num_experts": None,
    "num_local_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "output_router_logits": None,
    "router_aux_loss_coef": None,
}
GPT_OSS = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 128,
    "num_experts": None,
    "num_experts_per_tok": 4,
    "rope_theta": 150000.0,
    "quantization_config": None,
    "output_router_logits": None,
    "router_aux_loss_coef": None,
    "experts_per_token": None,
    "initial_context_length": None,  # of the first files: written twice
}
FAMILIES = {
    "llama": Family(("LlamaForCausalLM",)),
    "mistral": Family(("MistralForCausalLM",), {"sliding_window": 4096}),
    "ministral": Family(("MinistralForCausalLM",), {"sliding_window": 4096}),
    "ministral3": Family(
        ("Ministral3ForCausalLM",), {"sliding_window": None, "rms_norm_eps": 1e-5, "head_dim": 128}
    ),
    "qwen2": Family(("Qwen2ForCausalLM",), QWEN_WINDOWS, qkv_bias=True, windowed="later"),
    "qwen3": Family(
        ("Qwen3ForCausalLM",), {**QWEN_WINDOWS, "head_dim": 128}, qk_norm=True, windowed="later"
    ),
    "qwen3_moe": Family(
        ("Qwen3MoeForCausalLM",), QWEN3_MOE, qk_norm=True, width="moe_intermediate_size"
    ),
    "gpt_oss": Family(
        ("GptOssForCausalLM",),
        GPT_OSS,
        qkv_bias=True,
        windowed=2,
        interleaved=True,
        variant={"hidden_act": "swiglu_oai", "attention_sinks": True, "output_bias": True},
        accepted={"attention_bias": (True,), "swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)},
    ),
    "smollm3": Family(("SmolLM3ForCausalLM",), SMOLLM3, windowed="nope"),
    "olmo2": Family(("Olmo2ForCausalLM",), {"rms_norm_eps": 1e-5}, qk_norm=True, variant=OLMO),
    "olmo3": Family(
        ("Olmo3ForCausalLM",),
        {"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": None},
        qk_norm=True,
        variant=OLMO,
        windowed=4,
        ropes={"full_attention": 500000.0, "sliding_attention": 0.0},
    ),
    "granite": Family(("GraniteForCausalLM",), GRANITE),
    "phi3": Family(("Phi3ForCausalLM",), PHI3, fused=True),
    "gemma3_text": Family(
        ("Gemma3ForCausalLM",),
        GEMMA3,
        qk_norm=True,
        windowed=6,
        norm_offset=1.0,
        variant={"norm_placement": "both", "hidden_act": "gelu_pytorch_tanh"},
        ropes={"full_attention": 1e6, "sliding_attention": 1e4},
    ),
}
# the family of the text model beside a vision tower
TEXT_OF = {"gemma3": "gemma3_text", "mistral3": "mistral"}
SUPPORTED = (
    f"model_type {', '.join((*FAMILIES, *TEXT_OF))}: decoders with RoPE and RMSNorm, such as Llama 2 and 3, SmolLM, "
    "Mistral, Qwen 2, 2.5 and 3 (also with experts), OLMo 2 and 3, Granite 3, "
    "Phi 3 and 4 mini, Gemma 3 (text), gpt-oss"
)
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": (False,),
    "lm_head_bias": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1.0,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "is_llama_config": (True,),
    "is_decoder": (True, False),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
}
HARMLESS = frozenset(
    {
        "architectures",
        "model_type",
        "auto_map",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "attention_dropout",
        "hidden_dropout",
        "pretraining_tp",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "tokenizer_class",
        "max_window_layers",
        "chunk_size_feed_forward",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "torchscript",
        "id2label",
        "label2id",
        "problem_type",
        "task_specific_params",
        "finetuning_task",
        "gradient_checkpointing",
        "use_bfloat16",
        "transformers.js_config",
        "unsloth_fixed",
        "unsloth_version",
        "attn_implementation",
        "num_logits_to_keep",
        "ignore_keys_at_rope_validation",
        "max_length",
        "do_sample",
        "temperature",
        "top_p",
        "top_k",
        "embd_pdrop",
        "resid_pdrop",
        "full_attn_mod",
        "interpolate_factor",
        "cache_implementation",
    }
)
MEANINGS = {
    "sparse_step": "dense layers among those with experts",
    "mlp_only": "dense layers among those with experts",
    "expert": "a mixture of experts",
    "moe": "a mixture of experts",
    "lora_rank": "multi-head latent attention",
    "linear_": "linear attention",
    "ssm": "a state space model",
    "mamba": "a state space model",
    "softcap": "logit soft-capping",
    "sink": "attention sinks",
    "parallel": "parallel attention and MLP",
    "swiglu": "another clamped SwiGLU",
    "quantization": "quantized safetensors (take the original weights, or a GGUF file)",
    "per_layer": "sizes that differ from layer to layer",
    "bias": "a bias of the output projection or of the MLP",
}

GATED = "gated attention among layers of linear attention"
BY_NAME = {"qwen35": GATED, "qwen3next": GATED}  # by beginnings of names
