"""Export a training checkpoint (torch DCP) as a Hugging Face folder; `laneformer.hf.export` does the work.

    python -m tools.export_hf --checkpoint runs/demo/phase2/checkpoint/step-150 --out runs/demo/hf

The model card states the training progress that the run's metrics.jsonl holds for the checkpoint's step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tyro

from laneformer.hf.export import DType, Progress, checkpoint_step, export
from records.checkpoints import check_contents
from records.files import read_lines
from records.job import read_sections


def main(
    checkpoint: Path,
    out: Path,
    dtype: DType = "bfloat16",
    config: Path | None = None,
    tokenizer: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Write the Hugging Face folder `out`; the last line of stdout is JSON.

    Args:
        checkpoint: torch DCP folder, `runs/<name>/checkpoint/step-N`
        out: folder to create
        dtype: dtype of the weights in `out`
        config: path of `model.json`; default: the run folder's
        tokenizer: path of a SentencePiece `tokenizer.model` or of a `tokenizer.json`; default: the run folder's
        overwrite: replace `out` if it is not empty
    """
    check_contents(checkpoint)
    check_joins(checkpoint)
    progress = training_progress(checkpoint)
    print(json.dumps(export(checkpoint, out, dtype, config, tokenizer, overwrite, progress=progress)))


def check_joins(checkpoint: Path) -> None:
    """ValueError for a checkpoint of tools.ablate whose joins no config describes: exported, it would be another
    model.
    """
    path = checkpoint.resolve().parent.parent / "config.toml"
    joins = read_sections(path).get("variant", {}).get("joins") if path.is_file() else None
    if joins:
        raise ValueError(
            f"{checkpoint} was trained with variant.joins = {joins!r}, which a Hugging Face config cannot express; "
            "only models whose joins [architecture] describes can be exported"
        )


def training_progress(checkpoint: Path) -> Progress:
    """Phase, total tokens and loss in the last row of metrics.jsonl about the checkpoint's
    step; None where unknown.
    """
    step = checkpoint_step(checkpoint)
    rows = read_lines(checkpoint.resolve().parent.parent / "metrics.jsonl") if step is not None else []
    known: dict[str, Any] = {}
    for row in rows:
        if row.get("step") == step:
            known |= {key: row[key] for key in ("phase", "tokens_total", "loss") if row.get(key) is not None}
    return Progress(step=step, **known)


if __name__ == "__main__":
    try:
        tyro.cli(main, prog="python -m tools.export_hf")
    except (ValueError, OSError) as error:
        raise SystemExit(f"tools.export_hf: {error}") from None
