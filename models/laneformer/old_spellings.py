"""Older spellings in folders of Laneformers: the published kogai/laneformer-2b-it loads as it is.

Its first modeling code has the model type `laneformer_tp`, one switch `use_comm` for both modules, and counts
the layers with a sliding window instead of listing them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OLDER = "laneformer_tp"
MODEL_TYPES = ("laneformer", OLDER)
DEFAULTS = {  # of the older config class, for keys that a file leaves out
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "intermediate_size": 16384,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "num_lanes": 1,
    "broadcast_delay": 1,
    "lm_head_type": "replicate",
    "sliding_window": None,
    "sliding_window_n_layers": 0,
    "use_comm": True,
    # it adds the outputs of early layers, which every lane has had already, once more
    # `broadcast_delay` layers later. Whether a folder was trained so is what
    # `python -m tools.check published FOLDER --trust-remote-code` finds out
    "rebroadcast_early": True,
}
WITHOUT_EFFECT = ("multiple_of", "depth_init", "use_flex_attn")


def modern_spelling(values: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` with the keys of LaneformerConfig; ValueError for what it says that cannot be said so."""
    read = {**DEFAULTS, **values} if values.get("model_type") == OLDER else dict(values)
    if read.get("attn_mask_type", "causal") != "causal":
        raise ValueError(
            f"attn_mask_type = {read['attn_mask_type']!r} is not supported; only 'causal'"
        )
    if values.get("model_type") == OLDER and read["lm_head_type"] == "lane":
        raise ValueError(
            f"lm_head_type = 'lane' of {OLDER} scores all lanes at once, which is not supported"
        )
    if (comm := read.pop("use_comm", None)) is not None:
        if not comm and read.get("use_early_comm", True) and read.get("broadcast_delay"):
            raise ValueError(
                "use_comm = False with use_early_comm = True is not supported: lanes that join early only"
            )
        read = {"use_attention_comm": comm, "use_mlp_comm": comm, **read}
    unclamped = read.pop("unclamped_layers", None) or []
    if (count := read.pop("sliding_window_n_layers", None)) is not None:
        layers = range(read["num_hidden_layers"])
        windowed = layers[:count] if count >= 0 else layers[count:]
        read["swa_layers"] = [i for i in windowed if i not in unclamped]
    if read.get("sliding_window", 0) is None:
        if read.get("swa_layers"):
            raise ValueError("sliding_window is missing, but some layers have one")
        del read["sliding_window"]
    if read.get("num_key_value_heads", 0) is None:
        read["num_key_value_heads"] = read["num_attention_heads"]
    return {
        name: value
        for name, value in read.items()
        if name not in (*WITHOUT_EFFECT, "attn_mask_type")
    }
