"""Where a job starts: its own newest complete checkpoint, else the phase before, else (only if allowed) random weights.

TorchTitan 0.2.2 decides this by whether the checkpoint folder exists, trusts the newest `.metadata`, and lets a second
phase inherit the first one's optimizer settings. This class replaces the decision and keeps its saving and loading.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.checkpoint import DATALOADER, MODEL, OPTIMIZER, CheckpointManager
from torchtitan.tools.logging import logger

from .checkpoint_times import CheckpointTimes
from .optimizer import apply_optimizer_settings

STEP_FOLDER = re.compile(r"step-(\d+)$")


class PhaseCheckpointManager(CheckpointManager):
    """TorchTitan's checkpoint manager with a start that never falls back to random weights by accident."""

    optimizer_config: Any = None  # set by the trainer: the job's own optimizer section
    allow_fresh_start: bool = False
    started_from: Path | None = None  # what `load` used, None for random weights

    def configure(self, job_config: Any) -> None:
        """Take the settings that CheckpointManager's constructor does not hand over. Raises ValueError."""
        section = job_config.checkpoint
        self.optimizer_config = job_config.optimizer
        self.allow_fresh_start = section.allow_fresh_start
        self.times = CheckpointTimes()
        if section.exclude_from_loading:
            raise ValueError(
                f"checkpoint.exclude_from_loading = {section.exclude_from_loading} would drop these states at every "
                "restart too; remove it: a new phase takes weights and moments only, a restart takes everything"
            )
        if section.initial_load_in_hf:
            raise ValueError(
                "checkpoint.initial_load_in_hf is not supported; turn the folder into a checkpoint with "
                "`python -m tools.import_hf --hf DIR --out RUN_DIR` and give that as checkpoint.initial_load_path"
            )

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """TorchTitan's, timed."""
        if self._should_save(curr_step, last_step):
            with self.times.saving(self):
                super().save(curr_step, last_step)

    def maybe_wait_for_staging(self) -> None:
        """TorchTitan's, timed."""
        with self.times.blocking():
            super().maybe_wait_for_staging()

    def load(self, step: int = -1) -> bool:
        """Restore the job's state. Returns whether anything was loaded. Raises ValueError where that is not safe."""
        if not self.enable:
            self._require_fresh_start("checkpoint.enable = false")
            return False
        folder = Path(self.folder)
        own = folder / f"step-{step}" if step != -1 else on_rank_zero(lambda: newest_complete_checkpoint(folder))
        if own is not None:
            self._load(own, list(self.states))
            self.started_from = own
        elif self.initial_load_path:
            self._start_phase(Path(self.initial_load_path))
        else:
            self._require_fresh_start(f"no complete checkpoint in {self.folder} and no checkpoint.initial_load_path")
            return False
        return True

    def _require_fresh_start(self, why: str) -> None:
        if not self.allow_fresh_start:
            raise ValueError(
                f"{why}: the job would start from random weights; set checkpoint.allow_fresh_start = true if that is "
                "meant, or checkpoint.initial_load_path to the checkpoint to continue from"
            )
        logger.info("Starting from random weights (checkpoint.allow_fresh_start)")

    def _start_phase(self, parent: Path) -> None:
        wanted = [MODEL] if self.initial_load_model_only else [MODEL, OPTIMIZER]
        stored = self._load(parent, wanted)
        self.started_from = parent
        if f"{DATALOADER}.mixture" in stored:
            state = {DATALOADER: self.states[DATALOADER].state_dict()}
            self.dcp_load(state, str(parent), from_hf=False, from_quantized=False)
            self.states[DATALOADER].continue_after(json.loads(state[DATALOADER]["mixture"])["windows"])
        logger.info(
            f"New phase from {parent}: {' and '.join(wanted)}; schedule, settings and data order are this job's"
        )

    def _load(self, folder: Path, names: list[str]) -> set[str]:
        """Load these states; returns the names of everything that the checkpoint holds."""
        on_rank_zero(lambda: check_complete(folder))
        stored = set(read_metadata(folder).state_dict_metadata)
        states = self._flattened_model_states_sd({name: self.states[name] for name in names})
        missing = sorted(set(self.states[MODEL].state_dict()) - stored)
        if missing:
            raise ValueError(
                f"{folder} lacks {len(missing)} of the model's tensors, first {missing[0]!r}; wrong flavor?"
            )
        logger.info(f"Loading {', '.join(names)} from {folder}")
        self.dcp_load(states, str(folder), from_hf=False, from_quantized=False)
        if OPTIMIZER in names:
            apply_optimizer_settings(self.states[OPTIMIZER], self.states["lr_scheduler"], self.optimizer_config)
        return stored


def on_rank_zero(decide: Callable[[], Any]) -> Any:
    """Let rank 0 look at the shared disk and tell the others, so that all ranks start from the same place.

    Its ValueError is raised on every rank: nobody waits for a rank that has given up.
    """
    answer: list[Any] = [None, None]
    if torch.distributed.get_rank() == 0:
        try:
            answer[0] = decide()
        except ValueError as problem:
            answer[1] = str(problem)
    torch.distributed.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise ValueError(answer[1])
    return answer[0]


def newest_complete_checkpoint(folder: Path) -> Path | None:
    """The newest complete `step-N` folder, warning about incomplete ones; None if there is none yet.

    Raises ValueError when there are several checkpoints and all are damaged: that is a disk problem, not a new run.
    """
    steps = {int(m[1]): path for path in folder.glob("step-*") if (m := STEP_FOLDER.search(path.name))}
    for step in sorted(steps, reverse=True):
        try:
            check_complete(steps[step])
        except ValueError as problem:
            logger.warning(f"Skipping a checkpoint: {problem}")
            continue
        return steps[step]
    if len(steps) > 1:
        raise ValueError(
            f"all {len(steps)} checkpoints in {folder} are incomplete; repair or move them away before starting again"
        )
    return None


def read_metadata(folder: Path) -> Any:
    """DCP's own index of a checkpoint. Raises ValueError when it is missing or unreadable."""
    try:
        with open(folder / ".metadata", "rb") as file:
            return pickle.load(file)
    except (OSError, EOFError, pickle.UnpicklingError) as problem:
        raise ValueError(f"{folder} is not a complete checkpoint: .metadata cannot be read ({problem})") from problem


def check_complete(folder: Path) -> None:
    """Compare every data file with the extent that `.metadata` names; raises ValueError with the file that is short."""
    needed_bytes: dict[str, int] = {}
    for entry in read_metadata(folder).storage_data.values():
        name = entry.relative_path
        needed_bytes[name] = max(needed_bytes.get(name, 0), entry.offset + entry.length)
    for name, size_bytes in needed_bytes.items():
        path = folder / name
        have_bytes = path.stat().st_size if path.is_file() else 0
        if have_bytes < size_bytes:
            raise ValueError(f"{path} holds {have_bytes} bytes, its .metadata names {size_bytes}")
