"""GGUF files as llama.cpp's converter writes them, from random Transformers models and small tokenizers."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import quantize
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from laneformer.llama.gguf import GLOBAL_NAMES, LAYER_NAMES, LONGROPE, OWN_NAMES, PERMUTED

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 16,
}
KINDS = {
    "llama": "Llama",
    "smollm3": "SmolLM3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "granite": "Granite",
    "phi3": "Phi3",
    "gemma3": "Gemma3Text",
    "mistral3": "Ministral3",
    "qwen3moe": "Qwen3Moe",
    "gpt-oss": "GptOss",
}
TEXTS = [
    "",
    " ",
    "Hi there",
    "  two  spaces\n\n\n\tand a tab",
    "1234567 89 3.14",
    "naïve é e\u0301 Å 日本語 한국어 😀",
    "I'LL don't we've",
    "x<|end|>y <|end|>",
    "def f(x):\n        return x  # eight\n",
    " trailing ",
    "xYz axYz",
]

PIECES = ("1234567", "I'LL don't", "we've\n\n x", " 3.14\n", "xYz")
BLOCKS: dict[str, tuple[int, int, dict[int, float]]] = {
    # inputs, bytes, offsets of fp16 numbers with their size for weights of about 1 (MXFP4: none)
    "Q4_0": (32, 18, {0: 0.2}), "Q4_1": (32, 20, {0: 0.2, 2: -1.5}), "Q5_0": (32, 22, {0: 0.1}),
    "Q5_1": (32, 24, {0: 0.1, 2: -1.5}), "Q8_0": (32, 34, {0: 0.013}), "IQ4_NL": (32, 18, {0: 0.015}),
    "Q4_K": (256, 144, {0: 0.006, 2: 0.045}), "Q5_K": (256, 176, {0: 0.003, 2: 0.045}),
    "Q6_K": (256, 210, {208: 0.0007}), "IQ4_XS": (256, 136, {0: 0.0008}),
    "MXFP4": (32, 17, {}),
}  # fmt: skip


def random_blocks(kind: str, rows: int, inputs: int, seed: int = 0) -> np.ndarray:
    """Return (rows, bytes per row) of weights with a deviation of about 1 / sqrt(inputs)."""
    count, size, halves = BLOCKS[kind]
    rng = np.random.default_rng([seed, rows, inputs])
    blocks = rng.integers(0, 256, (rows, inputs // count, size), np.uint8)
    for offset, scale in halves.items():
        values = rng.uniform(0.7, 1.3, (*blocks.shape[:2], 1)) * scale / inputs**0.5
        blocks[:, :, offset : offset + 2] = values.astype(np.float16).view(np.uint8)
    # the first byte is the scale's exponent, biased by 127
    if kind == "MXFP4":
        blocks[:, :, 0] = 126 - int(np.log2(inputs) / 2) - rng.integers(0, 3, blocks.shape[:2])
    return blocks.reshape(rows, -1)


def random_llama(architecture: str, **overrides: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{KINDS[architecture]}Config")(**{**SHAPE, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                # Gemma 3 adds 1 to its norm scales, so they are centred at 0, like biases
                zero = "norm" not in name or architecture == "gemma3"
                p.copy_((not zero) + 0.2 * torch.randn(p.shape))
            else:
                p.copy_(torch.randn(p.shape) * (1.0 if "embed" in name else p.shape[-1] ** -0.5))
    return model


def permute_heads(weight: np.ndarray, heads: int) -> np.ndarray:
    """Interleave the two halves of each head's rows, as the converter does for Llama's queries and keys."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    architecture: str,
    model: Any,
    kind: str | Callable[[str], str] = "F32",
    fields: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    part_tensors: int = 0,
) -> Path:
    """Write `model` with matrices of type `kind`, and norms and biases in F32.

    Args:
        kind: may depend on a matrix's name in the file.
        fields: override those of the converter and the tokenizer; None removes one.
        extra: more tensors.
    """
    c = model.config
    architecture = {"olmo3": "olmo2"}.get(architecture, architecture)
    writer = GGUFWriter(path, architecture, split_max_tensors=part_tensors)
    fields_of_model, more_tensors = own_fields(architecture, c)
    # later ones replace earlier ones
    for name, value in {**fields_of_model, **plain_fields(), **(fields or {})}.items():
        if value is not None:
            # the package takes every integer for one of 32 bits
            large = isinstance(value, int) and value >= 2**31
            of = GGUFValueType.UINT64 if large else GGUFValueType.get_type(value)
            writer.add_key_value(name, value, of)
    heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}
    for name, value in {**split_fused(model.state_dict()), **more_tensors, **(extra or {})}.items():
        # a tied head is not stored twice
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        array = np.asarray(value, np.float32)
        part = name.split(".")[-2]
        # the converter stores 1 + scale
        if architecture == "gemma3" and name.endswith("norm.weight"):
            array = array + 1
        if architecture in PERMUTED and part in heads:
            array = permute_heads(array, heads[part])
        if array.ndim < 2 or part == "gate" or name.endswith(".bias"):  # of them a router
            writer.add_tensor(gguf_name(name, architecture), array)
            continue
        type_of = kind if isinstance(kind, str) else kind(gguf_name(name, architecture))
        shape = int(np.prod(array.shape[:-1])), array.shape[-1]  # of experts one after the other
        # the gguf package cannot write these types, so their weights are random
        is_random = type_of in BLOCKS and type_of not in (
            "Q4_0",
            "Q4_1",
            "Q5_0",
            "Q5_1",
            "Q8_0",
            "MXFP4",
        )
        data = (
            random_blocks(type_of, *shape)
            if is_random
            else quantize(array, GGMLQuantizationType[type_of])
        )
        data = data.reshape(*array.shape[:-1], -1)
        writer.add_tensor(
            gguf_name(name, architecture), data, raw_dtype=GGMLQuantizationType[type_of]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if part_tensors else path


def split_fused(state: dict[str, Any]) -> dict[str, Any]:
    """Separate the experts' gate and up projections, as checkpoints have them."""
    tensors: dict[str, Any] = {}
    of_gpt_oss = any("router" in name for name in state)
    for name, value in state.items():
        stem, _, part = name.rpartition(".experts.") if ".experts." in name else (name, "", "")
        if of_gpt_oss:  # transposed, gates and ups by turns
            name = name.replace(".mlp.router.", ".mlp.gate.").replace(".sinks", ".sinks.weight")
            kind = "bias" if part.endswith("_bias") else "weight"
            value = value.swapaxes(-1, -2) if part and kind == "weight" else value
            if part.startswith("gate_up_proj"):
                for i, projection in enumerate(("gate_proj", "up_proj")):
                    tensors[f"{stem}.experts.{projection}.{kind}"] = value[:, i::2]
            else:
                tensors[f"{stem}.experts.down_proj.{kind}" if part else name] = value
        elif part == "gate_up_proj":
            gate, up = value.chunk(2, 1)
            tensors |= {
                f"{stem}.experts.gate_proj.weight": gate,
                f"{stem}.experts.up_proj.weight": up,
            }
        else:
            tensors[f"{name}.weight" if part == "down_proj" else name] = value
    return tensors


def own_fields(architecture: str, c: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the converter's fields of this model, and the tensors that it adds."""
    rope = c.rope_parameters.get("full_attention") or c.rope_parameters
    head_dim, kind = (
        getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        rope["rope_type"],
    )
    fields = {
        "block_count": c.num_hidden_layers,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if architecture in PERMUTED:
        fields["rope.dimension_count"] = head_dim
    elif architecture == "phi3":
        fields["rope.dimension_count"] = int(rope["partial_rotary_factor"] * head_dim)
    else:
        fields |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if kind in ("yarn", "linear"):
        fields |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        fields["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if architecture in ("olmo2", "gemma3", "phi3", "gpt-oss"):
        fields["attention.sliding_window"] = getattr(c, "sliding_window", None)
    if architecture == "olmo2" and hasattr(c, "layer_types"):
        windowed = [kind == "sliding_attention" for kind in c.layer_types]
        fields["attention.sliding_window_pattern"] = windowed
    if architecture in ("qwen3moe", "gpt-oss"):
        width = getattr(c, "moe_intermediate_size", c.intermediate_size)
        fields |= {"expert_count": c.num_experts, "expert_used_count": c.num_experts_per_tok}
        fields["expert_feed_forward_length"] = width
    if architecture == "granite":
        fields |= {
            "embedding_scale": c.embedding_multiplier,
            "residual_scale": c.residual_multiplier,
            "attention.scale": c.attention_multiplier,
            "logit_scale": c.logits_scaling,
        }
    if architecture == "mistral3":
        fields["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        fields["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    tensors = {}
    if kind == "longrope":
        length = c.original_max_position_embeddings
        factor = np.sqrt(1 + np.log(c.max_position_embeddings / length) / np.log(length))
        fields |= {
            "rope.scaling.attn_factor": float(factor),
            "rope.scaling.original_context_length": length,
        }
        tensors = {of: np.float32(rope[f"{name}_factor"]) for name, of in LONGROPE.items()}
    return {f"{architecture}.{name}": value for name, value in fields.items()}, tensors


def gguf_name(name: str, architecture: str) -> str:
    stem, kind = name.rsplit(".", 1)
    whole = {ours: theirs for theirs, ours in GLOBAL_NAMES.items()}
    if stem in whole:
        return f"{whole[stem]}.{kind}"
    if not stem.startswith("model.layers."):
        return name
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    names = {
        ours: theirs for theirs, ours in (LAYER_NAMES | OWN_NAMES.get(architecture, {})).items()
    }
    return f"blk.{layer}.{names[part]}.{kind}"


def byte_level(
    pre_tokenizer: Any,
    normalizer: Any = None,
    ignore_merges: bool = False,
    texts: Sequence[str] = PIECES,
) -> Tokenizer:
    """Return a BPE of at most 320 pieces with two control tokens and an added word."""
    # pieces are trained on whole lines, so another way to split a text gives other ids
    tokenizer = Tokenizer(BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    special = ["<|begin|>", "<|text|>", "<|end|>"]
    trainer = BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([*texts] * 9, trainer)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens([AddedToken("<|text|>", special=False, normalized=False)])
    return tokenizer


def tokenizer_fields(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """Return the converter's fields of a byte-level tokenizer."""
    pieces = [tokenizer.id_to_token(i) or f"[PAD{i}]" for i in range(SHAPE["vocab_size"])]
    template = "{% for m in messages %}{{ bos_token + m.content + eos_token }}{% endfor %}"
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": pieces,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "token_type": [3, 4, 3, *(5 if piece.startswith("[PAD") else 1 for piece in pieces[3:])],
        "merges": [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]],
    }
    return {f"tokenizer.ggml.{name}": v for name, v in fields.items()} | {
        "tokenizer.chat_template": template
    }


@functools.cache
def plain_fields() -> dict[str, Any]:
    return tokenizer_fields(byte_level(ByteLevel(add_prefix_space=False)), "gpt-2")
