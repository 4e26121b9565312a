"""Export the late model as a Hugging Face folder, which Transformers and the engine run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from laneformer.engine.folder import Checkpoint
from laneformer.hf.export import (
    round_weight,
    stage_folder,
    verify,
    write_configs,
    write_weights,
)
from laneformer.hf.tokenizer import list_token_ids, save_tokenizer

from .job_config import Late

TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def late_architecture(late: Late) -> dict[str, Any]:
    """Return the fields of a config that describe what is late."""
    return {
        "broadcast_delay": late.delay,
        "first_late_layer": late.first_late_layer,
        "flush": late.flush,
    }


def write_folder(
    architecture: Mapping[str, Any],
    checkpoint: Checkpoint,
    weights: Mapping[str, Tensor],
    out: Path,
    card: str,
) -> dict[str, Any]:
    """Write `out` in bfloat16; load it back and compare.

    Args:
        architecture: `late_architecture`.
        checkpoint: the dense model.
        weights: the late model's; those that the config does not name are left out, such as a tied
            model's head, which was frozen.

    Returns:
        out, dtype, and the largest difference of Transformers' logits from the plain model's.

    Raises:
        ValueError: for weights that are not finite.
    """
    config = replace(checkpoint.config, **architecture)
    stored = {
        name: round_weight(name, weights[name], "bfloat16") for name in config.tensor_shapes()
    }
    with stage_folder(out, overwrite=True) as folder:
        write_weights(folder, stored)
        # tokenizer, prefix, chat template and the ids that end answers are the dense model's own
        write_text_files(checkpoint, folder)
        write_configs(folder, config, "bfloat16", token_ids(checkpoint))
        (folder / "README.md").write_text(card)
        difference = verify(folder, config, stored)
    return {"out": str(out), "dtype": "bfloat16", "hf_max_logit_diff": difference}


def write_text_files(checkpoint: Checkpoint, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, and chat_template.jinja if there is one."""
    if checkpoint.tokenizer is None:
        raise ValueError("the dense model has no tokenizer.json")
    folder.mkdir(parents=True, exist_ok=True)
    longest = checkpoint.config.max_position_embeddings
    save_tokenizer(checkpoint.tokenizer, special_tokens(checkpoint), folder, longest)
    template = checkpoint.tokenizer_config.get("chat_template")
    # several templates by name
    if isinstance(template, dict):
        template = template.get("default")
    if template:
        (folder / "chat_template.jinja").write_text(template)


def special_tokens(checkpoint: Checkpoint) -> dict[str, str]:
    tokens = {name: checkpoint.tokenizer_config.get(name) for name in TOKENS}
    # a text, or an AddedToken as a dictionary
    return {name: t["content"] if isinstance(t, dict) else t for name, t in tokens.items() if t}


def token_ids(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return bos_token_id, eos_token_id (all that end an answer) and pad_token_id."""
    assert checkpoint.tokenizer is not None, "write_text_files refuses a model without one"
    ids = list_token_ids(checkpoint.tokenizer, special_tokens(checkpoint))
    return ids | {"eos_token_id": list(checkpoint.eos_ids)}


def model_card(late: Late, layers: int, name: str, steps: int) -> str:
    end = ", and what is left at the end before the final norm" if late.flush else ""
    first, delay = late.first_late_layer, late.delay
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- laneformer
- custom_code
---

# {name}, with late lanes

{name} cut into {late.lanes} lanes. From layer {first} of {layers} on a lane adds the others' outputs {delay} layer(s)
late{end}. Those layers were distilled against the dense model for {steps:,} steps (`python -m tools.delay_a_model`).

`laneformer chat FOLDER`, `laneformer serve FOLDER` and `laneformer generate FOLDER --prompt TEXT` run it; with
Transformers (4.57 or 5.x) `AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)`.
Its licence is that of {name}.
"""
