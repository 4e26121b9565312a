"""The recovered model as a Hugging Face folder, which Transformers and the engine run.

Architecture and weights are written as `laneformer.hf.export` writes a trained model's. What belongs to the text is
the dense model's own: the tokenizer with what it puts in front of a text, the chat template, the ids that end answers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from laneformer import LaneformerConfig
from laneformer.engine.folder import Checkpoint
from laneformer.hf.export import (
    DType,
    rounded,
    staged_folder,
    verify,
    write_code,
    write_configs,
    write_weights,
)

from .damage import Row
from .job_config import Late

TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- laneformer
- custom_code
---

# {name}, with late lanes

{name} cut into {lanes} lanes. From layer {first} of {layers} on a lane adds the others' outputs {delay} layer(s)
late{end}. Those layers were distilled against the dense model for {steps:,} steps (`python -m tools.delay_a_model`).

| bits per byte, {windows} held-out windows | |
|---|---:|
| dense | {dense:.3f} |
| made late, without training | {before:.3f} |
| this model | {after:.3f} |

`laneformer chat FOLDER`, `laneformer serve FOLDER` and `laneformer generate FOLDER --prompt TEXT` run it; with
Transformers (4.57 or 5.x) `AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)`.
Its licence is that of {name}.
"""


def late_config(config: LaneformerConfig, late: Late) -> LaneformerConfig:
    """The dense model's config with the joins of `late`. Its head is tied where it was: it has been frozen."""
    first = 0 if late.first_late_layer == late.delay else late.first_late_layer
    return replace(config, broadcast_delay=late.delay, first_late_layer=first, flush=late.end == "flushed")


def write_folder(
    late: Late,
    checkpoint: Checkpoint,
    trained: Mapping[str, Tensor],
    out: Path,
    card: str,
    dtype: DType = "bfloat16",
) -> dict[str, Any]:
    """`out` from trained weights; the folder is loaded back and compared.

    trained: the late model's; what the config does not name is left out. checkpoint: the dense model. Returns out,
    dtype, and the largest difference of Transformers' logits from the plain model's. ValueError for weights that are
    not finite.
    """
    config = late_config(checkpoint.config, late)
    weights = {name: rounded(name, trained[name], dtype) for name in config.tensor_shapes()}
    with staged_folder(out, overwrite=True) as folder:
        write_weights(folder, weights)
        write_text_files(checkpoint, folder)
        special = {name: token for name, token in special_tokens(checkpoint).items() if name != "unk_token"}
        assert checkpoint.tokenizer is not None, "the command refuses a model without one"
        ids = {f"{name}_id": checkpoint.tokenizer.token_to_id(token) for name, token in special.items()}
        write_configs(folder, config, dtype, ids | {"eos_token_id": list(checkpoint.eos_ids)})
        write_code(folder)
        (folder / "README.md").write_text(card)
        difference = verify(folder, config, weights)
    return {"out": str(out), "dtype": dtype, "hf_max_logit_diff": difference}


def write_text_files(checkpoint: Checkpoint, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json, and chat_template.jinja if the model has one."""
    assert checkpoint.tokenizer is not None, "the command refuses a model without one"
    checkpoint.tokenizer.save(str(folder / "tokenizer.json"))
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # others are rebuilt from their class by 5.x, with other ids
        **special_tokens(checkpoint),
        "padding_side": "left",
        "model_max_length": checkpoint.config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(values, indent=2) + "\n")
    template = checkpoint.tokenizer_config.get("chat_template")
    if isinstance(template, dict):
        template = template.get("default")
    if template:
        (folder / "chat_template.jinja").write_text(template)


def special_tokens(checkpoint: Checkpoint) -> dict[str, str]:
    named = {name: checkpoint.tokenizer_config.get(name) for name in TOKENS}
    return {name: t["content"] if isinstance(t, dict) else t for name, t in named.items() if t}


def card_of(late: Late, name: str, checkpoint: Checkpoint, rows: Sequence[Row], windows: Tensor) -> str:
    """The model card. rows: of recovery.jsonl, without training and of the last checkpoint among them."""
    config, last = checkpoint.config, max(rows, key=lambda row: row["step"])
    untrained = next(row for row in rows if row["step"] == 0)
    assert checkpoint.tokenizer is not None, "the command refuses a model without one"
    bits = bits_per_byte(checkpoint.tokenizer, windows)
    return CARD.format(
        name=name, lanes=config.num_lanes, first=late.first_late_layer, layers=config.num_hidden_layers,
        delay=late.delay, steps=last["step"], windows=len(windows),
        end=", and what is left at the end before the final norm" if late.end == "flushed" else "",
        dense=bits * fmean(last["dense"]), before=bits * fmean(untrained[late.end]), after=bits * fmean(last[late.end]),
    )  # fmt: skip


def bits_per_byte(tokenizer: Tokenizer, windows: Tensor) -> float:
    """What a loss of one nat a token is in bits per byte of the text of these windows, ids (n, S + 1)."""
    texts = tokenizer.decode_batch(windows[:, 1:].tolist(), skip_special_tokens=False)
    tokens = windows.shape[0] * (windows.shape[1] - 1)
    return tokens / sum(len(text.encode()) for text in texts) / math.log(2)
