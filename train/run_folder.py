"""The run folder: plain files with everything needed to understand, continue, export and plot a run.

config.toml      the resolved job config            attempts.jsonl   one line per attempt: code, start checkpoint
model.json       the architecture                   metrics.jsonl    one line per logged step
tokenizer.model  the tokenizer of the mixture       checkpoint/      TorchTitan's DCP checkpoints, step-N
events.jsonl     one line per event                 outcome.json     how the last attempt ended
logs/            output of every attempt            heartbeats/      one file per rank
bad-steps/       batches of refused steps           checkpoint-aside/  damaged or abandoned checkpoints
stop             create it to save and stop         skip_sequences.json  data that is left out, and why
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch

from laneformer.config import LaneformerConfig
from records.events import next_attempt
from records.files import append_line, code_version, write_atomically

from .job_config import resolved_toml


def open_run_folder(run: Path, job_config: Any, model: LaneformerConfig, tokenizer: Path | None) -> None:
    """Write the files that describe the run; an earlier, different config.toml is kept under its attempt's number."""
    run.mkdir(parents=True, exist_ok=True)
    resolved = resolved_toml(job_config)
    config = run / "config.toml"
    if config.is_file() and config.read_text(encoding="utf-8") != resolved:
        shutil.copy(config, run / f"config.attempt-{next_attempt(run) - 1}.toml")
    write_atomically(config, resolved)
    write_atomically(run / "model.json", json.dumps(model.to_dict(), indent=2) + "\n")
    if tokenizer is not None and tokenizer.is_file():
        write_atomically(run / "tokenizer.model", tokenizer.read_bytes())


def record_attempt(run: Path, **facts: Any) -> None:
    """Append this attempt to attempts.jsonl."""
    record = {
        "attempt": next_attempt(run),
        "time": time.time(),
        "code_version": code_version(Path(__file__).parent),
        "argv": sys.argv,
        "world_size": torch.distributed.get_world_size(),
        "torch": torch.__version__,
        **facts,
    }
    append_line(run / "attempts.jsonl", json.dumps(record))
