"""Average the weights of a run's checkpoints into a run folder with one checkpoint.

    python -m tools.average runs/phase1 --last 5 --out runs/phase1-average
    python -m tools.average runs/phase1/checkpoint/step-{480000,500000} --out runs/mean

In the stable part of a WSD schedule every checkpoint is off the valley that it moves along, each by
another random step. Their mean is near the valley, much as after a decay, at no training cost
(docs/train.md). Tensors are averaged one by one in float64 while the new checkpoint is written.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import torch
import torch.distributed.checkpoint as dcp
import tyro
from pydantic import Field
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from data_mixtures.shards import tokenizer_files
from laneformer.config import LaneformerConfig
from laneformer.hf.export import checkpoint_step, stage_folder
from records.checkpoints import (
    check_complete,
    check_contents,
    locate_checkpoint,
    read_architecture,
    read_metadata,
    run_folder,
    step_folders,
    write_checksums,
)
from records.command import Positive, check_ranges, run_function
from records.files import read_json, read_lines, write_json
from records.job import read_sections

# of a row of metrics.jsonl: what holds for the mean as well
ROW_KEYS = ("step", "phase", "attempt", "tokens", "tokens_total", "time")


class Reader(dcp.FileSystemReader):
    """One checkpoint; its index is read once, not once a tensor."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.index = super().read_metadata()

    def read_metadata(self, *_: Any, **__: Any) -> Any:
        return self.index


class MeanPlanner(DefaultSavePlanner):
    """Compute each tensor when DCP's writer asks for it, so that only one is in memory."""

    def __init__(self, checkpoints: Sequence[Path], weights: Sequence[float]):
        super().__init__()
        self.readers, self.weights = [Reader(folder) for folder in checkpoints], weights

    def lookup_object(self, index: Any) -> torch.Tensor:
        shape, dtype = self.state_dict[index.fqn].shape, self.state_dict[index.fqn].dtype
        # one tensor at a time: a large model does not fit twice
        total = torch.zeros(shape, dtype=torch.float64)
        part = {index.fqn: torch.empty(shape, dtype=dtype)}
        for reader, weight in zip(self.readers, self.weights, strict=True):
            dcp.load(part, storage_reader=reader, no_dist=True)
            total.add_(part[index.fqn], alpha=weight)
        return total.div_(sum(self.weights)).to(dtype)


def average(
    checkpoints: Annotated[tuple[Path, ...], tyro.conf.Positional],
    out: Path,
    last: Annotated[int, Field(ge=2)] | None = None,
    weights: tuple[Positive, ...] = (),
    force: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write the run folder `out` with checkpoint/step-N, where N is the newest step
    of the averaged checkpoints.

    Args:
        checkpoints: checkpoint folders, runs/<name>/checkpoint/step-N; with --last one run folder
        out: run folder to create
        last: average this many of the run's newest complete checkpoints
        weights: weight of each checkpoint in the given order; default: equal
        force: average checkpoints of different runs, too, and of models that differ in more than their weights
        overwrite: replace `out` if it is not empty
    """
    check_ranges(average, locals())
    started = time.monotonic()
    chosen = newest(checkpoints, last) if last is not None else list(checkpoints)
    weights = weights or (1.0,) * len(chosen)
    config = check(chosen, weights, force)
    # the newest lends its step, its dtypes and the files of its run
    step, path = max((checkpoint_step(folder) or 0, folder) for folder in chosen)
    stored = read_metadata(path).state_dict_metadata
    # without memory: the planner makes each tensor when it is written
    empty = {
        name: torch.empty(shape, dtype=stored[name].properties.dtype, device="meta")
        for name, shape in config.tensor_shapes().items()
    }
    with stage_folder(out, overwrite) as folder:
        averaged = {
            str(locate_checkpoint(source)): weight
            for source, weight in zip(chosen, weights, strict=True)
        }
        describe(folder, path, step, averaged)
        target = folder / f"checkpoint/step-{step}"
        dcp.save(empty, checkpoint_id=target, planner=MeanPlanner(chosen, weights), no_dist=True)
        write_checksums(target)
    seconds = round(time.monotonic() - started, 2)
    return {
        "checkpoint": str(out / f"checkpoint/step-{step}"),
        "averaged": len(chosen),
        "seconds": seconds,
    }


def newest(runs: Sequence[Path], count: int) -> list[Path]:
    """Return the newest complete checkpoints of a run; ValueError if there are too few."""
    if len(runs) != 1:
        raise ValueError(
            f"--last takes one run folder, not {len(runs)} paths; for example runs/phase1 --last 5"
        )
    complete = []
    for folder in step_folders(runs[0] / "checkpoint").values():
        try:
            check_complete(folder)
        except ValueError:
            # being written, or damaged
            continue
        complete.append(folder)
    if count > len(complete):
        raise ValueError(
            f"--last {count}: {runs[0]}/checkpoint holds {len(complete)} complete checkpoints"
        )
    return complete[:count]


def check(checkpoints: Sequence[Path], weights: Sequence[float], force: bool) -> LaneformerConfig:
    """Return the architecture of checkpoints that may be averaged; ValueError otherwise."""
    if len({path.resolve() for path in checkpoints}) < max(2, len(checkpoints)):
        raise ValueError(
            f"{len(checkpoints)} checkpoints given; give two or more different ones, or a run and --last N"
        )
    if len(weights) != len(checkpoints):
        raise ValueError(f"--weights {weights}: give {len(checkpoints)}, one a checkpoint")
    first, *others = checkpoints
    if (model := read_architecture(first)) is None:
        raise ValueError(
            f"{first} has no model.json, nor has its run folder; give a checkpoint of `train`"
        )
    for path in others:
        theirs = read_architecture(path) or {}
        run, other = (run_folder(folder).resolve() for folder in (first, path))
        differing = sorted(key for key in model | theirs if model.get(key) != theirs.get(key))
        if (run != other or differing) and not force:
            difference = (
                f"models that differ in {', '.join(differing)}" if differing else "two runs"
            )
            raise ValueError(
                f"{run} and {other} are {difference}; --force averages them all the same"
            )
    config = LaneformerConfig.from_dict(model)
    for path in checkpoints:
        check_complete(path)
        stored = read_metadata(path).state_dict_metadata
        for name, shape in config.tensor_shapes().items():
            actual = tuple(stored[name].size) if name in stored else "missing"
            if actual != shape:
                raise ValueError(f"{path}: {name} is {actual}, but model.json says {shape}")
        # a damaged tensor would be in the mean, whose own checksums are right
        check_contents(path)
    return config


def describe(folder: Path, newest: Path, step: int, averaged: dict[str, float]) -> None:
    """Write the files beside the checkpoint that export, evaluation and training need."""
    run = run_folder(newest)
    if not (tokenizer := tokenizer_files(run)):
        raise ValueError(
            f"{run} has no tokenizer.model or tokenizer.json; copy it there from the data folder"
        )
    for path in (run / "model.json", *tokenizer):
        if not path.is_file():
            raise ValueError(f"{path} does not exist; bring it back")
        shutil.copy(path, folder)
    for name in ("lineage.json", "config.toml", "metrics.jsonl"):
        # an imported run has none of them
        if not (run / name).is_file():
            print(
                f"{run} has no {name}: what it says is missing from the average, too",
                file=sys.stderr,
            )
    lineage = read_json(run / "lineage.json", {})
    write_json(folder / "lineage.json", {**lineage, "averaged": averaged})
    # the last step, which evals.watch takes whatever evals.every_steps is
    if (run / "config.toml").is_file():
        job = read_sections(run / "config.toml")
        job["training"]["steps"] = step
        (folder / "config.toml").write_text(tomli_w.dumps(job))
    rows = [row for row in read_lines(run / "metrics.jsonl") if row.get("step") == step]
    if rows:
        row = {key: rows[-1][key] for key in ROW_KEYS if key in rows[-1]}
        (folder / "metrics.jsonl").write_text(json.dumps({**row, "averaged": len(averaged)}) + "\n")


if __name__ == "__main__":
    run_function("tools.average", average)
