"""A Hugging Face folder of a Laneformer as a run folder with a model-only DCP checkpoint at step 0.

Weights become float32, which holds bfloat16 and float16 exactly: exporting again in the same dtype
gives the same bits.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from rich.console import Console
from safetensors import safe_open
from torch import Tensor

from ..config import DRAFT_IDS, LaneformerConfig, plain_name
from ..old_spellings import MODEL_TYPES, modern_spelling
from ..tensors import check_shapes, weight_files
from .configuration_laneformer import FIELDS
from .export import stage_folder
from .tokenizer import CHAT_TEMPLATE

console = Console(stderr=True)


def import_folder(hf: Path, out: Path, overwrite: bool = False) -> dict[str, Any]:
    """Write the run folder `out` from the exported folder `hf`.

    Args:
        hf: exported folder with config.json, model*.safetensors, tokenizer.model or tokenizer.json.
        out: run folder to create, with model.json, the tokenizer with its chat template, checkpoint/step-0.
        overwrite: replace `out` if it is not empty.

    Returns out, checkpoint, parameters, dtype (as stored in `hf`), tokenizer (whether `hf` has one), seconds.
    """
    started = time.monotonic()
    values = json.loads((hf / "config.json").read_text())
    if values.get("model_type") not in MODEL_TYPES:
        raise ValueError(
            f"{hf}/config.json: model_type is {values.get('model_type')!r}, not 'laneformer': training starts from a "
            "Laneformer's folder alone; `laneformer generate` and `serve` read models of the Llama family as they are"
        )
    values = modern_spelling(values)
    config = LaneformerConfig.from_dict(
        {key: value for key, value in values.items() if key in FIELDS}
    )
    console.print(f"reading {hf}")
    weights = read_weights(hf, config)
    dtypes = {str(weight.dtype).removeprefix("torch.") for weight in weights.values()}
    weights = {name: weights[name].float() for name in list(weights) if name != DRAFT_IDS}
    config = replace(config, draft_vocab_size=0)  # which is chosen again at export
    names = (
        ["tokenizer.model"]
        if (hf / "tokenizer.model").is_file()
        else ["tokenizer.json", "tokenizer_config.json"]
    )
    tokenizer = [hf / name for name in names if (hf / name).is_file()]
    template = (
        [hf / CHAT_TEMPLATE.name] if tokenizer and (hf / CHAT_TEMPLATE.name).is_file() else []
    )
    with stage_folder(out, overwrite) as folder:
        console.print(f"writing {folder}")
        (folder / "model.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n")
        for path in tokenizer + template:
            shutil.copyfile(path, folder / path.name)
        dcp.save(weights, checkpoint_id=folder / "checkpoint" / "step-0", no_dist=True)
    return {
        "out": str(out),
        "checkpoint": str(out / "checkpoint" / "step-0"),
        "parameters": sum(w.numel() for w in weights.values()),
        "dtype": ",".join(sorted(dtypes)),
        "tokenizer": bool(tokenizer),
        "seconds": round(time.monotonic() - started, 2),
    }


def read_weights(hf: Path, config: LaneformerConfig) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for file in weight_files(hf):
        with safe_open(file, framework="pt") as tensors:
            weights |= {plain_name(name): tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    check_shapes(
        str(hf), {name: tensor.shape for name, tensor in weights.items()}, config.tensor_shapes()
    )
    return weights
