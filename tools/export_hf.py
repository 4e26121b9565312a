"""Export a training checkpoint (torch DCP) as a Hugging Face folder; `laneformer.hf.export` does the work.

    python -m tools.export_hf --checkpoint runs/demo/phase2/checkpoint/step-150 --out runs/demo/hf

The model card states the training progress that the run's metrics.jsonl holds for the checkpoint's step.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from data_mixtures.mixture import TRAINED, Mixture, read_lock
from laneformer.hf.export import DType, Progress, checkpoint_step, export
from records.checkpoints import check_contents, check_is_checkpoint, run_folder
from records.command import Natural, check_ranges, run_function
from records.files import read_lines
from records.job import read_sections

# 8 million tokens of the 2B model's windows
COUNTED_WINDOWS, WINDOWS_AT_A_TIME = 2048, 64


def main(
    checkpoint: Path,
    out: Path,
    dtype: DType = "bfloat16",
    config: Path | None = None,
    tokenizer: Path | None = None,
    overwrite: bool = False,
    draft_vocab_size: Natural = 0,
    draft_lock: Path | None = None,
) -> dict[str, Any]:
    """Write the Hugging Face folder `out`; the last line of stdout is JSON.

    Args:
        checkpoint: torch DCP folder, `runs/<name>/checkpoint/step-N`
        out: folder to create
        dtype: dtype of the weights in `out`
        config: path of `model.json`; default: the run folder's
        tokenizer: path of a SentencePiece `tokenizer.model` or of a `tokenizer.json`; default: the run folder's
        overwrite: replace `out` if it is not empty
        draft_vocab_size: of a model with a head for multi-token prediction: how many ids it may draft, the
            most frequent in its data, which makes a draft cheaper; 0: all
        draft_lock: lock file of the mixture in which they are counted; default: the run's
    """
    check_ranges(main, locals())
    check_is_checkpoint(checkpoint)
    check_contents(checkpoint)
    progress = training_progress(checkpoint)
    ids = frequent_ids(checkpoint, draft_lock, draft_vocab_size) if draft_vocab_size else ()
    return export(
        checkpoint, out, dtype, config, tokenizer, overwrite, progress=progress, draft_ids=ids
    )


def frequent_ids(checkpoint: Path, lock: Path | None, count: int) -> tuple[int, ...]:
    """Return the most frequent ids in a mixture's first windows; of conversations, trained ids."""
    if lock is None:
        job = run_folder(checkpoint) / "config.toml"
        path = read_sections(job).get("mixture", {}).get("lock") if job.is_file() else None
        if path is None:
            raise ValueError(
                f"{job} does not say what data the run read; give its lock file as --draft-lock"
            )
        lock = Path(path)
    mixture = Mixture.open(lock)
    counts = np.zeros(mixture.vocab_size, dtype=np.int64)
    sources = [source for source in read_lock(lock)["sources"] if source["weight"]]
    weights = sum(source["weight"] for source in sources)
    # windows before any source begins again
    epoch = min(source["windows"] * weights // source["weight"] for source in sources)
    for first in range(0, last := max(1, min(COUNTED_WINDOWS, epoch)), WINDOWS_AT_A_TIME):
        size = min(WINDOWS_AT_A_TIME, last - first)
        tokens = mixture.sequences(first, size)[0]
        if mixture.packed:
            tokens = tokens[(mixture.flags(first, size) & TRAINED) > 0]
        counts += np.bincount(tokens.ravel(), minlength=mixture.vocab_size)
    if count > mixture.vocab_size:
        raise ValueError(
            f"draft_vocab_size = {count} is more than the {mixture.vocab_size} ids of {lock}; use fewer"
        )
    # stable: ids of equal counts come in the same order on every machine
    return tuple(np.argsort(-counts, kind="stable")[:count].tolist())


def training_progress(checkpoint: Path) -> Progress:
    """Return phase, total tokens and loss at the checkpoint's step; None where unknown."""
    step = checkpoint_step(checkpoint)
    path = run_folder(checkpoint) / "metrics.jsonl"
    rows = read_lines(path) if step is not None else []
    if not rows:
        print(
            f"no rows in {path}: the model card says nothing of the training's progress",
            file=sys.stderr,
        )
    progress = Progress(step=step)
    # of several rows of a step, which a restart repeats, the last one counts
    for row in rows:
        if row.get("step") == step:
            facts = {key: row.get(key) for key in ("phase", "tokens_total", "loss")}
            fields = {key: value for key, value in facts.items() if value is not None}
            progress = replace(progress, **fields)
    return progress


if __name__ == "__main__":
    run_function("tools.export_hf", main)
