"""Tests of the translation of Llama-family config.json files, and of refusals by name."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from laneformer.llama.config import config_of_llama, lanes_for
from laneformer.llama.tensors import laneformer_of, source_of
from laneformer.supports import refuse_unsupported
from laneformer.tensors import Tensor

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 130,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def values_of(family: str, **values: Any) -> dict[str, Any]:
    return {
        **LLAMA,
        "model_type": family,
        "architectures": None,
        "num_key_value_heads": 2,
        **values,
    }


def test_defaults_are_those_of_the_first_llama():
    # the first Llama's config.json had no keys for these
    config = config_of_llama(LLAMA, 2)
    assert (config.num_key_value_heads, config.head_dim) == (4, 16)
    assert (config.rope_theta, config.norm_eps) == (10000.0, 1e-6)
    assert (config.num_lanes, config.broadcast_delay, config.lm_head_type) == (
        2,
        0,
        "vocab_parallel",
    )
    assert (config.swa_layers, config.rope_scaling, config.tie_word_embeddings) == ((), None, False)
    assert not config.extensions()
    assert config_of_llama(LLAMA, 4).lm_head_type == "replicate", (
        "lanes that do not divide the vocabulary"
    )


def sizes(heads: int, kv_heads: int | None, width: int) -> dict[str, Any]:
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": width,
    }


@pytest.mark.parametrize(
    ("values", "lanes"),
    [
        (sizes(32, 8, 8192), {8: 8, 16: 8, 6: 2, 5: 1}),
        (sizes(9, 3, 1536), {2: 1, 3: 3}),
        (sizes(32, None, 11008), {4: 4}),
    ],
)
def test_lanes_share_the_threads_evenly(values, lanes):
    assert {threads: lanes_for(values, threads) for threads in lanes} == lanes


@pytest.mark.parametrize(
    "values",
    [
        {"rope_scaling": LLAMA3, "rope_theta": 5e5},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    ],
)
def test_both_spellings_of_rope(values):
    config = config_of_llama(LLAMA | values, 1)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == {
        name: value for name, value in LLAMA3.items() if name != "rope_type"
    }


@pytest.mark.parametrize(
    ("family", "values", "window", "layers"),
    [
        ("mistral", {}, 4096, (0, 1, 2, 3)),
        ("qwen2", {"sliding_window": 32}, None, ()),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 32}, None, ()),  # from layer 28 on
        (
            "smollm3",
            {"use_sliding_window": True, "sliding_window": 8, "no_rope_layers": [1, 0, 1, 0]},
            8,
            (1, 3),
        ),
    ],
)
def test_windows(family, values, window, layers):
    config = config_of_llama(values_of(family, **values), 1)
    assert config.swa_layers == layers
    assert {config.window(i) for i in layers} == ({window} if layers else set())


def test_what_a_family_has():
    assert config_of_llama(values_of("qwen2"), 1).extensions() == {"attention_bias": True}
    assert config_of_llama(values_of("qwen3"), 1).extensions() == {"head_dim": 128, "qk_norm": True}
    smollm3 = config_of_llama(values_of("smollm3"), 1)
    assert (smollm3.extensions(), smollm3.nope_layers) == ({}, (3,))
    assert (smollm3.rope_theta, smollm3.tie_word_embeddings) == (2000000.0, True)


def test_a_config_of_text_and_vision_is_that_of_its_text():
    # also in Gemma 3's older spelling of RoPE
    rope = {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    text = values_of("gemma3_text", **rope, sliding_window=8, head_dim=16, query_pre_attn_scalar=64)
    nested = {"model_type": "gemma3", "vision_config": {"hidden_size": 8}, "text_config": text}
    config = config_of_llama(text, 2)
    assert config_of_llama(nested, 2) == config
    assert lanes_for(nested, 2) == 2
    full, sliding = config.variant.ropes
    assert (full.frequencies[0], sliding.frequencies[0]) == (0.125, 1.0)


def test_joint_norms_have_one_lane():
    assert lanes_for(values_of("olmo2"), 8) == 1
    with pytest.raises(ValueError, match="joint_qk_norm num_lanes = 1"):
        config_of_llama(values_of("olmo2"), 2)


@pytest.mark.parametrize("family", ["gemma3_text", "granite", "olmo2", "phi3", "qwen3_moe"])
def test_a_variant_is_the_same_from_a_file(family):
    config = config_of_llama(
        values_of(family, rope_scaling={"rope_type": "linear", "factor": 8.0}), 1
    )
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ValueError, match=r"training does not support .*ropes = \d"):
        refuse_unsupported(config, "training")


GPT_OSS = {"model_type": "gpt_oss", "architectures": None}
QWEN3_MOE = {"model_type": "qwen3_moe", "architectures": None, "num_experts": 8}
PHI3 = {"model_type": "phi3", "architectures": None}
QWEN35 = r"is not supported \(.*gated attention among layers of linear attention.*\); the nearest that is: "
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 6}
YARN = {"rope_type": "yarn", "factor": 4.0}
REFUSALS: list[tuple[dict[str, Any], str]] = [
    # families
    (
        {"model_type": "qwen2_moe", "num_experts": 8},
        r"'qwen2_moe' is not supported \(a mixture of experts\); the nearest that is: 'qwen3_moe'; supp",
    ),
    (
        {"model_type": "qwen3_5", "text_config": {"linear_num_key_heads": 16}},
        QWEN35 + "'qwen3'; supp",
    ),
    ({"model_type": "qwen3_5_moe_text", "num_experts": 8}, QWEN35 + "'qwen3_moe'; supp"),
    ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, r"\(multi-head latent attention\)"),
    (
        {"model_type": "gemma2", "attn_logit_softcapping": 50.0},
        r"\(logit soft-capping\); the nearest that is: 'gemma3'; supported are folders of",
    ),
    (
        {"model_type": "bloom"},
        r"'bloom' is not supported; supported are .* llama, mistral, .*qwen2",
    ),
    ({"model_type": None}, "model_type = None is not supported"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "only LlamaForCausalLM"),
    # experts
    (QWEN3_MOE | {"decoder_sparse_step": 2}, r"step = 2 is not .* .dense layers among .*; only 1"),
    (
        QWEN3_MOE | {"mlp_only_layers": [0]},
        r"mlp_only_layers = \[0\] is not supported .dense layers",
    ),
    (QWEN3_MOE | {"num_experts_per_tok": 9}, r"total=8, active=9.* must be from 1 to `total`"),
    ({"num_experts": 4}, "num_experts = 4 is not supported .a mixture of experts."),
    (GPT_OSS | {"swiglu_limit": 5.0}, r"swiglu_limit = 5.0 .*only 7.0"),
    (
        GPT_OSS | {"quantization_config": {"quant_method": "fp8"}},
        r"quant_method 'fp8'; supported is 'mxfp4'",
    ),
    # RoPE
    (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
        "dynamic.* is not supported; supported are the types default, llama3, linear, yarn, longrope",
    ),
    ({"rope_scaling": {**YARN, "temperature": 2}}, "temperature.* is not supported"),
    (
        PHI3 | {"rope_scaling": LONGROPE},
        r"long_factor and short_factor hold \[6, 8\] numbers; 8 pairs rotate",
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        "full_attention.* is not supported",
    ),
    (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        r"rope_scaling lacks \['low_freq_fac",
    ),
    # all else
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; only 'silu'"),
    (
        {"mlp_bias": True},
        "mlp_bias = True is not supported .a bias of the output projection or of the MLP.; only",
    ),
    ({"quantization_config": {"quant_method": "awq"}}, "quantized safetensors"),
    ({"residual_multiplier": 0.2}, "multiplier = 0.2 is not supported; it may change what the"),
    ({"sliding_window": 4096}, "sliding_window = 4096 is not supported"),
    (
        {"layer_types": ["full_attention"] * 3 + ["linear_attention"]},
        r"holds \['linear_attention'\]",
    ),
    ({"layer_types": ["full_attention"] * 3}, "3 entries for 4 layers"),
    # values
    ({"hidden_size": None}, r"config.json lacks \['hidden_size'\]"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps = .small. must be a number, without quotes"),
]


@pytest.mark.parametrize(("values", "message"), REFUSALS)
def test_refusals(values, message):
    config_of_llama(
        {**LLAMA, "_name_or_path": "x", "torch_dtype": "bfloat16", "some_new_switch": None}, 1
    )
    with pytest.raises(ValueError, match=message):
        config_of_llama(LLAMA | values, 1)


def tensors_of(values: dict[str, Any]) -> dict[str, Tensor]:
    config = config_of_llama(values, 1)
    tensors = {}
    for name, shape in config.tensor_shapes().items():
        flat = (int(np.prod(shape[:-1])), shape[-1]) if len(shape) > 1 else shape
        tensors[source_of(name)] = Tensor("fp32", np.ones(flat, np.float32))
    return tensors


KEYS = "model.layers.1.self_attn.k_proj.weight"
BIAS = "model.layers.0.mlp.gate_proj.bias"
WRONG_TENSORS: list[tuple[dict[str, Any], dict[str, tuple[int, ...]], str]] = [
    # values of the config, shapes of other tensors
    ({}, {KEYS: (8,)}, rf"{KEYS} has shape \(8,\), the config says \(64, 64\)"),
    ({}, {BIAS: (8,)}, r"has not, such as model\.layers\.0\.mlp\.gate_proj\.bias"),
    (
        {"tie_word_embeddings": True},
        {"lm_head.weight": (130, 64)},
        r"embeddings = True, but lm_head\.weight is not the embedding",
    ),
]


def test_wrong_tensors_are_named():
    tensors = tensors_of(LLAMA)
    # old checkpoints have it, though rope_theta says the same
    harmless = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": Tensor("fp32", np.zeros(8, np.float32))
    }
    laneformer_of(LLAMA, tensors | harmless, 2)
    for values, shapes, message in WRONG_TENSORS:
        others = {
            name: Tensor("fp32", np.zeros(shape, np.float32)) for name, shape in shapes.items()
        }
        with pytest.raises(ValueError, match=message):
            laneformer_of(LLAMA | values, tensors | others, 1)
    del tensors[KEYS]
    with pytest.raises(ValueError, match=f"lacks 1 tensors, such as {KEYS}"):
        laneformer_of(LLAMA, tensors, 1)
