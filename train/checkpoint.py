"""Choose where a job starts: its newest complete checkpoint, the phase before, or (if allowed) random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan.components.checkpoint import DATALOADER, MODEL, OPTIMIZER
from torchtitan.tools.logging import logger

from laneformer.config import HEAD_FIELDS, MTP, LaneformerConfig
from laneformer.tensors import check_shapes
from records import checkpoints
from records.events import record_event

from .checkpoint_checks import ChecksumVerifier, check_schedule, on_rank_zero, require_nothing_lost
from .checkpoint_saves import CheckpointSaver
from .optimizer import apply_optimizer_settings


class PhaseCheckpointManager(CheckpointSaver):
    """TorchTitan's checkpoint manager with a start that never falls back to random weights by accident."""

    # what `load` used, None for random weights
    started_from: Path | None = None

    def __init__(
        self,
        job_config: Any,
        *,
        get_architecture: Callable[[], LaneformerConfig],
        stopping: Callable[[], bool],
        after_save: Callable[[int], None],
        **titan: Any,
    ):
        """Take the arguments of CheckpointSaver; `get_architecture` is called here, when TorchTitan has a model."""
        super().__init__(job_config, get_architecture(), stopping, after_save, titan)
        section, self.job_config = job_config.checkpoint, job_config
        self.allow_changes = section.allow_changes
        self.allow_fresh_start = section.allow_fresh_start
        # checkpoint of another run, to continue from with all states
        self.resume_from = (
            Path(section.initial_load_path) if section.initial_load_all_states else None
        )
        self.verifier = ChecksumVerifier()

    def load(self, step: int = -1) -> bool:
        """Restore the job's state; return whether any was loaded, ValueError where that is unsafe."""
        if not self.enable:
            require_fresh_start(self.allow_fresh_start, "checkpoint.enable = false")
            return False
        # TorchTitan 0.2.2 decides by whether the checkpoint folder exists, and trusts the newest `.metadata`
        folder = Path(self.folder)
        # a step that was named is taken as it is: `check` below refuses it if it is damaged
        own_checkpoint = (
            folder / f"step-{step}" if step != -1 else self.verifier.newest_undamaged(folder)
        )
        # the first start of a branch is a restart from another run's checkpoint
        start = own_checkpoint or self.resume_from
        if own_checkpoint is None:
            # a run that is older than all the saves that may fail in a row has had a checkpoint: refuse
            # to begin again where it is gone
            on_rank_zero(
                lambda: require_nothing_lost(
                    self.run, folder, self.interval * self.failed.max_in_a_row
                )
            )
        if start is not None:
            self.verifier.check(
                start, self.architecture, self.allow_changes if own_checkpoint is None else ()
            )
            on_rank_zero(lambda: check_schedule(start, self.job_config))
        # only now: a start that is refused has moved nothing
        if not self.load_only:
            on_rank_zero(lambda: clear_branch(self.run, folder, own_checkpoint))
        if start is not None:
            self._load(start, list(self.states))
            self.started_from = start
        elif self.initial_load_path:
            self._start_phase(Path(self.initial_load_path))
        else:
            require_fresh_start(
                self.allow_fresh_start,
                f"no complete checkpoint in {self.folder} and no checkpoint.initial_load_path",
            )
            return False
        return True

    def _start_phase(self, parent: Path) -> None:
        names = [MODEL] if self.initial_load_model_only else [MODEL, OPTIMIZER]
        adds_head: bool = on_rank_zero(lambda: lacks_head(parent, self.architecture))
        # a phase that adds the head may change the head's fields, whatever allow_changes says
        self.verifier.check(parent, self.architecture, self.allow_changes + adds_head * HEAD_FIELDS)
        stored = self._load(parent, names, adds_head)
        self.started_from = parent
        # a checkpoint of imported weights holds no position in the data
        if f"{DATALOADER}.mixture" in stored:
            state = {DATALOADER: self.states[DATALOADER].state_dict()}
            self.dcp_load(state, str(parent), from_hf=False, from_quantized=False)
            self.states[DATALOADER].start_phase_after(json.loads(state[DATALOADER]["mixture"]))
        listing = " and ".join(names)
        logger.info(
            f"New phase from {parent}: {listing}; schedule, settings and data order are this job's"
        )

    def _load(self, folder: Path, names: list[str], adds_head: bool = False) -> set[str]:
        """Load these states; return the names in the checkpoint."""
        stored = checkpoints.read_metadata(folder).state_dict_metadata
        states = self._flattened_model_states_sd({name: self.states[name] for name in names})
        states, model = (
            drop_head(part, adds_head) for part in (states, self.states[MODEL].state_dict())
        )
        # the model's states have no prefix of their own
        other_prefixes = tuple(f"{name}." for name in self.states if name != MODEL)
        shapes = {
            name: entry.size
            for name, entry in stored.items()
            if not name.startswith(other_prefixes)
        }
        expected = {name: tensor.shape for name, tensor in model.items()}
        check_shapes(
            str(folder),
            shapes,
            expected,
            "; set model.flavor and [architecture] to the checkpoint's",
        )
        logger.info(f"Loading {', '.join(names)} from {folder}")
        self.dcp_load(states, str(folder), from_hf=False, from_quantized=False)
        if OPTIMIZER in names:
            apply_optimizer_settings(
                self.states[OPTIMIZER], self.states["lr_scheduler"], self.job_config.optimizer
            )
        return set(stored)


def drop_head(states: dict[str, Any], adds_head: bool) -> dict[str, Any]:
    """Drop the states of a head for multi-token prediction that this phase adds."""
    return {
        name: state for name, state in states.items() if not (adds_head and name.startswith(MTP))
    }


def lacks_head(checkpoint: Path, config: LaneformerConfig) -> bool:
    """Tell whether a checkpoint lacks the job's head for multi-token prediction."""
    checkpoints.check_complete(checkpoint)
    stored = checkpoints.read_metadata(checkpoint).state_dict_metadata
    return config.num_nextn_predict_layers > 0 and not any(name.startswith(MTP) for name in stored)


def clear_branch(run: Path, folder: Path, start: Path | None) -> None:
    """Put aside the checkpoints that are newer than where the job starts."""
    for name, action in checkpoints.clear_branch(folder, start).items():
        logger.warning(f"{name} is newer than where this job starts: {action}")
        record_event(run, "checkpoint_removed", checkpoint=name, what=action)


def require_fresh_start(allowed: bool, why: str) -> None:
    """Raise ValueError unless random weights are allowed."""
    if not allowed:
        raise ValueError(
            f"{why}: the job would start from random weights; set checkpoint.allow_fresh_start = true if that is "
            "meant, or checkpoint.initial_load_path to the checkpoint to continue from"
        )
    logger.info("Starting from random weights (checkpoint.allow_fresh_start)")
