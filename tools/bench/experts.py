"""GGUF files of mixtures of experts with random weights: a few layers of the published shapes, a small vocabulary.

A layer is what the published model has; Qwen3-30B-A3B has 48 of them and a vocabulary of 151,936, gpt-oss-20b 24 and
201,088. llama.cpp's own quantizer makes the types of the files that people hold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from tools.bench.llamacpp import CACHE_FOLDER, as_gguf, write_random_gguf, written_once

Flavor = Literal["qwen3moe", "gpt-oss"]
ALIKE: dict[str, Any] = {
    "context_length": 4096, "vocab_size": 32000, "layer_norm_rms_eps": 1e-6, "rope_freq_base": 1e6,
}  # fmt: skip
FIELDS: dict[Flavor, dict[str, Any]] = {
    "qwen3moe": {
        **ALIKE, "block_count": 4, "embedding_length": 2048, "feed_forward_length": 6144, "head_count": 32,
        "head_count_kv": 4, "key_length": 128, "value_length": 128, "expert_count": 128, "expert_used_count": 8,
        "expert_feed_forward_length": 768,
    },
    "gpt-oss": {
        **ALIKE, "block_count": 4, "embedding_length": 2880, "feed_forward_length": 2880, "head_count": 64,
        "head_count_kv": 8, "key_length": 64, "value_length": 64, "expert_count": 32, "expert_used_count": 4,
        "expert_feed_forward_length": 2880, "sliding_window": 128,
    },
}  # fmt: skip
KINDS: dict[Flavor, str] = {"qwen3moe": "q4_k_m", "gpt-oss": "mxfp4_moe"}


def shapes_of(flavor: Flavor, fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors under the names that llama.cpp reads."""
    d, v = fields["embedding_length"], fields["vocab_size"]
    e, f, head = fields["expert_count"], fields["expert_feed_forward_length"], fields["key_length"]
    q, kv = fields["head_count"] * head, fields["head_count_kv"] * head
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (d,), "attn_q.weight": (q, d), "attn_k.weight": (kv, d), "attn_v.weight": (kv, d),
        "attn_output.weight": (d, q), "ffn_gate_inp.weight": (e, d), "ffn_gate_exps.weight": (e, f, d),
        "ffn_up_exps.weight": (e, f, d), "ffn_down_exps.weight": (e, d, f),
    }  # fmt: skip
    if flavor == "gpt-oss":
        biased = [name.removesuffix(".weight") for name in layer if "norm" not in name]
        layer |= {f"{name}.bias": layer[f"{name}.weight"][:-1] for name in biased}
        layer |= {"attn_sinks.weight": (fields["head_count"],), "post_attention_norm.weight": (d,)}
    else:
        layer |= {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,), "ffn_norm.weight": (d,)}
    blocks = {f"blk.{i}.{name}": shape for i in range(fields["block_count"]) for name, shape in layer.items()}
    return {"token_embd.weight": (v, d), "output_norm.weight": (d,), **blocks, "output.weight": (v, d)}


def random_experts(flavor: Flavor, folder: Path = CACHE_FOLDER, fields: dict[str, Any] | None = None) -> Path:
    """The file, written once and kept, as is the one in bf16 that it is made of."""
    fields = fields or FIELDS[flavor]
    sizes = "x".join(str(fields[name]) for name in ("block_count", "embedding_length", "expert_count"))
    made = written_once(
        folder / f"{flavor}-{sizes}-bf16.gguf",
        lambda path: write_random_gguf(path, flavor, fields, shapes_of(flavor, fields), "bf16"),
    )
    return as_gguf(made, KINDS[flavor], folder)
