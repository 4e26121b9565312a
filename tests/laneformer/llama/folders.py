"""Tiny folders of every family, written by Transformers' classes, and their logits by every reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from laneformer import Engine, Laneformer
from laneformer.engine.folder import read_checkpoint
from laneformer.llama import layers

if TYPE_CHECKING:
    import transformers

IDS = np.random.default_rng(0).integers(0, 128, 100).tolist()
# float32 sums in another order err by about 1e-6 here; a wrong rotation, window or bias by 1e-2
ALLOWED = 1e-5

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 160,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
WINDOW = 16
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
MINISTRAL3 = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
OLMO3_ROPES = {
    "full_attention": YARN,
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.3, 1.4, 1.5, 1.6], "long_factor": [1.0, 2.0, 3.0, 5.0, 9.0, 12.0]}  # fmt: skip
GRANITE = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
}
GPT_OSS = {
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "sliding_window": WINDOW,
    "head_dim": 24,
    "rope_parameters": YARN | {"rope_theta": 150000.0, "truncate": False},
}
EXPERTS = {"moe_intermediate_size": 40, "num_experts": 7, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Case:
    """One folder: config class, differences from SIZES, weight type, and options of save_pretrained."""

    kind: str
    values: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    options: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "llama": Case("Llama", {"vocab_size": 128, "num_key_value_heads": 4}),
    "llama-tied": Case("Llama", {"tie_word_embeddings": True}, torch.bfloat16),
    "llama-tied-fp16": Case(
        "Llama", {"tie_word_embeddings": True, "vocab_size": 132}, torch.float16
    ),
    "smollm": Case(
        "Llama",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "hidden_size": 48,
            "tie_word_embeddings": True,
        },
    ),
    "llama3": Case(
        "Llama",
        {"rope_parameters": LLAMA3, "eos_token_id": [2, 5, 9]},
        torch.bfloat16,
        {"max_shard_size": "40KB"},
    ),
    "mistral-window": Case("Mistral", {"sliding_window": WINDOW}, torch.float16),
    "mistral": Case("Mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2": Case("Qwen2", {"tie_word_embeddings": True}, torch.bfloat16),
    "qwen2-windows": Case(
        "Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    ),
    "qwen3": Case("Qwen3", {"head_dim": 40, "tie_word_embeddings": True}, torch.bfloat16),
    "qwen3-layer-types": Case(
        "Qwen3",
        {
            "head_dim": 12,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3-moe": Case(
        "Qwen3Moe", {**EXPERTS, "head_dim": 40, "norm_topk_prob": True}, torch.bfloat16
    ),
    "qwen3-moe-odds": Case(
        "Qwen3Moe",
        {
            **EXPERTS,
            "num_experts": 40,
            "num_experts_per_tok": 5,
            "sliding_window": WINDOW,
            "use_sliding_window": True,
        },
    ),
    "gpt-oss": Case("GptOss", GPT_OSS, torch.bfloat16),
    "gpt-oss-layer-types": Case(
        "GptOss",
        {
            **GPT_OSS,
            "layer_types": KINDS[1:] + KINDS[1:2],
            "intermediate_size": 40,
            "tie_word_embeddings": True,
        },
    ),
    "yarn": Case("Llama", {"rope_parameters": YARN}),
    "olmo2": Case("Olmo2", {"num_key_value_heads": 4}, torch.bfloat16),
    "olmo3": Case(
        "Olmo3", {"sliding_window": WINDOW, "layer_types": KINDS, "rope_parameters": OLMO3_ROPES}
    ),
    "granite": Case("Granite", {**GRANITE, "tie_word_embeddings": True}, torch.bfloat16),
    "phi4-mini": Case(
        "Phi3",
        {
            "rope_parameters": LONG,
            "tie_word_embeddings": True,
            "vocab_size": 128,
            "original_max_position_embeddings": 32,
        },
        torch.bfloat16,
    ),
    "phi3-window": Case("Phi3", {"sliding_window": WINDOW}),
    "gemma3": Case(
        "Gemma3Text",
        {
            "head_dim": 24,
            "sliding_window": WINDOW,
            "layer_types": KINDS,
            "query_pre_attn_scalar": 40,
            "rope_parameters": GEMMA3_ROPES,
        },
        torch.bfloat16,
    ),
    "ministral": Case(
        "Ministral", {"sliding_window": WINDOW, "layer_types": KINDS, "head_dim": 24}
    ),
    "ministral3": Case(
        "Ministral3", {"rope_parameters": MINISTRAL3, "head_dim": 24}, torch.bfloat16
    ),
    "smollm3-yarn": Case("SmolLM3", {"num_hidden_layers": 5, "rope_parameters": YARN}),
    "smollm3": Case("SmolLM3", {"num_hidden_layers": 5, "num_key_value_heads": 1}, torch.float16),
}


# Transformers is imported where it is used, so that collection does not need it.
def write_folder(case: Case, folder: Path) -> Path:
    # their size is such that every module and every position matters
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{case.kind}Config")(**{**SIZES, **case.values})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape)
            is_scale = name.endswith("norm.weight")
            p.copy_(1 + 0.2 * noise if is_scale else (0.3 if p.dim() == 1 else 0.15) * noise)
    model.to(case.dtype).save_pretrained(folder, **case.options)
    return folder


def reference(folder: Path) -> transformers.PreTrainedModel:
    # a model in 16 bits would round its rotary table, too
    import transformers

    # other ways to multiply by experts want rows of whole 16 bytes
    options = {"dtype": torch.float32, "experts_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@torch.no_grad()
def logits_of(model: torch.nn.Module, ids: list[int] = IDS) -> np.ndarray:
    out = model(torch.tensor([ids]))
    return getattr(out, "logits", out)[0].numpy()


def plain_model(path: Path, precision: torch.dtype = torch.float32, **options: Any) -> Laneformer:
    """Return model.py with the translated tensors of a folder or a GGUF file."""
    from tools.check.reference import weights_of

    checkpoint = read_checkpoint(path, **options)
    with torch.device("meta"):
        model = layers.plain_model(checkpoint.config).eval()
    weights = weights_of(checkpoint.tensors)
    model.load_state_dict(
        {name: weight.to(precision) for name, weight in weights.items()}, assign=True
    )
    return model


def engine_logits(path: Path, ids: list[int] = IDS, **options: Any) -> np.ndarray:
    with Engine.from_pretrained(path, cache=False, **options) as engine:
        return engine.logits(ids)


def change_tensors(
    folder: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], object]
) -> Path:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, to / "model.safetensors")
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    return to


def relative_error(logits: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest distance of a position's logits, relative to the spread of the expected ones."""
    spread = expected - expected.mean(-1, keepdims=True)
    return float(
        (np.linalg.norm(logits - expected, axis=-1) / np.linalg.norm(spread, axis=-1)).max()
    )


def write_with_vision(
    kind: str, text: Case, folder: Path
) -> tuple[Path, transformers.PreTrainedModel]:
    """Write a text model beside a tiny vision tower, and the same text model alone (float32)."""
    import transformers

    tower = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    alone = transformers.AutoModelForCausalLM.from_pretrained(write_folder(text, folder / "alone"))
    config = getattr(transformers, f"{kind}Config")(
        text_config=alone.config.to_dict(), vision_config=tower, tie_word_embeddings=False
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    model.model.language_model.load_state_dict(alone.model.state_dict())
    model.lm_head.load_state_dict(alone.lm_head.state_dict())
    model.save_pretrained(folder / "both")
    return folder / "both", alone.eval()
