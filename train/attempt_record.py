"""Write what a run folder says of an attempt before its first step: its settings, code, and position in the data."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch

from data_mixtures.shards import tokenizer_files
from laneformer.config import LaneformerConfig
from records.checkpoints import locate_checkpoint, run_folder
from records.files import (
    append_or_keep,
    code_version,
    survive_full_disk,
    write_atomically,
    write_json,
)

from .data import MixtureLoader
from .job_config import format_job


def describe_attempt(
    run: Path,
    attempt: int,
    step: int,
    job_config: Any,
    model: LaneformerConfig,
    loader: MixtureLoader,
    started_from: Path | None,
) -> None:
    """Write config.toml, model.json, the tokenizer, lineage.json, and a line of attempts.jsonl.

    Args:
        started_from: the checkpoint that was loaded.
    """
    resolved, config, lineage = format_job(job_config), run / "config.toml", run / "lineage.json"
    with survive_full_disk(run):
        # the settings of earlier attempts stay: a change between two of them may explain a curve
        if config.is_file() and config.read_text(encoding="utf-8") != resolved:
            shutil.copy(config, run / f"config.attempt-{attempt - 1}.toml")
        write_atomically(config, resolved)
        write_json(run / "model.json", model.to_dict())
        for path in tokenizer_files(loader.lock.parent):
            write_atomically(run / path.name, path.read_bytes())
        if not lineage.is_file():
            # a run whose lineage.json was lost starts from its own checkpoint, which is no parent
            of_other_run = (
                started_from is not None and run_folder(started_from).resolve() != run.resolve()
            )
            parent = str(locate_checkpoint(started_from)) if started_from and of_other_run else None
            facts = {"parent": parent, "tokens_before": loader.tokens_before()}
            write_json(lineage, facts)
    line = {
        "attempt": attempt,
        "time": time.time(),
        "code_version": code_version(Path(__file__).parent),
        "argv": sys.argv,
        "world_size": torch.distributed.get_world_size(),
        "torch": torch.__version__,
        "step": step,
        "started_from": str(started_from) if started_from else "random weights",
        "mixture_fingerprint": loader.mixture.fingerprint,
        # `records.attempts.read_attempts` finds the batch of any step with it
        "data": {
            "lock": str(loader.lock.resolve()),
            "position": loader.state.sequences,
            "global_batch_size": job_config.training.global_batch_size,
            "offsets": loader.state.offsets,
        },
        "skip_sequences": loader.skips.ranges,
    }
    append_or_keep(run / "attempts.jsonl", json.dumps(line))
