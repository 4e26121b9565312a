"""A `config.json` of another family as a LaneformerConfig with delay 0; what would compute otherwise
is refused by name.

One table, FAMILIES, says what tells the families apart.

A key is read, or known to change nothing, or refused: a misread key costs an error message, an ignored one a
wrong model. Defaults of keys that a file leaves out are those of the family's config class in Transformers.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import LaneformerConfig
from .rope import rope_fields
from .variant import Experts, FamilyConfig, Variant

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
BLOCK = 32  # inputs that share a scale in MXFP4
MAX_GPU_LANES = 8  # as `2b` has: 16 multiprocessors of an H200 to each
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
    """What tells a family from Llama.

    architectures: its classes in Transformers. optional: keys that a file may leave out, with their defaults.
    variant: fields of a LaneformerConfig's variant. windowed: the layers with a window where `layer_types` does not
    say, see `windows`. ropes: bases of full and sliding layers, where they differ. norm_offset: what is added to
    norms' weights. fused: whether queries, keys and values are one matrix, gate and up another. width: the key
    with the rows of the MLP, or of each expert. accepted: what keys may hold, in place of ACCEPTED.
    interleaved: whether experts are stored as gpt-oss's are (interleaved.py), in blocks that lanes do not cut.
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
TEXT_OF = {
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
}  # the family of the text model beside a vision tower
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


def config_of_llama(values: Mapping[str, Any], lanes: int) -> LaneformerConfig:
    """The architecture with its heads and MLP rows on `lanes` lanes. ValueError names what is not supported."""
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
        # Granite adds r times a module's output: its streams are held divided by r, which a norm undoes
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
    """The config of the text model alone, where a vision tower stands beside it."""
    family, text = TEXT_OF.get(values.get("model_type", "")), values.get("text_config")
    if family is None or not isinstance(text, Mapping):
        return values
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
    """Scales of embeddings, scores and queries, by the names of a Variant."""
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
    """Lanes for a model that has none of its own: one a thread, or a group of threads for
    each of fewer lanes.
    """
    family = family_named(values)
    if family.variant.get("joint_qk_norm"):
        return 1
    heads = shared_sizes(values, ("num_attention_heads", "num_key_value_heads"))
    rows = shared_sizes(values, (family.width,))
    if family.interleaved:
        rows = [size // BLOCK if size % BLOCK == 0 else size for size in rows]
    return math.gcd(threads, *heads, *rows)


def lanes_for_gpus(values: Mapping[str, Any], gpus: int) -> int:
    """Lanes that GPUs share evenly, with whole heads, MLP rows and vocabulary rows;
    many, for short exchanges.
    """
    shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    sizes = shared_sizes(values, shared)
    return max(
        (n for n in range(gpus, MAX_GPU_LANES + 1, gpus) if all(s % n == 0 for s in sizes)),
        default=gpus,
    )


def family_named(values: Mapping[str, Any]) -> Family:
    """That of the text model; Llama where there is no such family, which is refused later."""
    return FAMILIES.get(str(text_values(values).get("model_type")), FAMILIES["llama"])


def shared_sizes(values: Mapping[str, Any], names: tuple[str, ...]) -> list[int]:
    read = {**family_named(values).optional, **text_values(values)}
    return [size for name in names if isinstance(size := read.get(name), int)]


def family_of(values: Mapping[str, Any]) -> Family:
    """The family that `model_type` names, after every key has been looked at."""
    name = values.get("model_type")
    if name not in FAMILIES:
        raise ValueError(
            f"model_type = {name!r} is not supported{why_not(str(name), (*FAMILIES, *TEXT_OF), values)}; "
            f"supported are folders of this project, and {SUPPORTED}"
        )
    family = FAMILIES[name]
    given = values.get("architectures") or family.architectures
    if not set(given) & set(family.architectures):
        raise ValueError(
            f"architectures = {given} is not supported; only {' or '.join(family.architectures)}"
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
    known = OPTIONAL | family.optional
    if isinstance(value, str) and (key in SIZES or isinstance(known.get(key), int | float)):
        raise ValueError(f"config.json: {key} = {value!r} must be a number, without quotes")
    if key in SIZES or key in known or key in HARMLESS or key.startswith("_"):
        return
    accepted = ACCEPTED | family.accepted
    if value is None or value in accepted.get(key, ()):
        return
    meaning = meaning_of(key)
    only = f"; only {' or '.join(map(repr, accepted[key]))}" if key in accepted else ""
    raise ValueError(
        f"config.json: {key} = {value!r} is not supported"
        + (f" ({meaning})" if meaning else "")
        + only
        + ("" if only else f"; it may change what the model computes. Supported is {SUPPORTED}")
    )


def why_not(name: str, known: Iterable[str], values: Mapping[str, Any]) -> str:
    """Of a family, or a GGUF file's architecture, that is not known: what it has, and the nearest that is."""
    text = values.get("text_config")
    every = {**values, **text} if isinstance(text, Mapping) else values
    reasons = {meaning for key, value in every.items() if value and (meaning := meaning_of(key))}
    reasons |= {
        meaning for start, meaning in BY_NAME.items() if name.replace("_", "").startswith(start)
    }
    near = difflib.get_close_matches(name.removesuffix("_text"), known, n=1)
    why = f" ({', '.join(sorted(reasons))})" if reasons else ""
    return why + (f"; the nearest that is: {near[0]!r}" if near else "")


def meaning_of(key: str) -> str | None:
    return next((meaning for part, meaning in MEANINGS.items() if part in key), None)


def windows(
    read: Mapping[str, Any], family: Family, layers: range, nope: tuple[int, ...]
) -> tuple[int | None, tuple[int, ...]]:
    """The sliding window (None: there is none) and the layers that have it."""
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
        windowed = tuple(layers[read["max_window_layers"] :])
    elif isinstance(family.windowed, int):
        every = read.get("sliding_window_pattern") or family.windowed
        windowed = tuple(i for i in layers if (i + 1) % every)
    else:
        windowed = nope if family.windowed == "nope" else tuple(layers)
    # Transformers does not look at layer_types
    blind = read["model_type"] in ("mistral", "ministral3", "phi3", "qwen3_moe")
    if blind and window and windowed != tuple(layers):
        raise ValueError(
            f"layer_types of model_type {read['model_type']!r} must all be 'sliding_attention', "
            "as Transformers computes"
        )
    return window, windowed if window else ()


def layers_without_rope(read: Mapping[str, Any], layers: range) -> tuple[int, ...]:
    """From `no_rope_layers`, which is 1 where a layer has RoPE, or each `no_rope_layer_interval`-th layer."""
    has_rope, every = read["no_rope_layers"], read["no_rope_layer_interval"]
    if has_rope is None:
        return tuple(layers[every - 1 :: every])
    return tuple(i for i in layers if not has_rope[i])
