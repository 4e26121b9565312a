"""One trunk and its branches: jobs of the shipped trainer, each from the weights of the one before."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_mixtures.mixture import Mixture
from records.checkpoints import newest_complete_checkpoint
from records.events import BAD_STEP, DONE, read_outcome
from records.files import append_line, code_version, read_lines
from tools.ablate.trainer import same_origin, train, with_sections, write_job
from tools.bench.harness import ROOT

from .measure import measured
from .plan import Job, Plan

CHANGES = ["max_position_embeddings", "rope_theta", "window_rope_theta", "rope_scaling", "nope_layers"]


@dataclass(frozen=True)
class Place:
    """Where an experiment stands: its folder, its text, and the data of each length of window."""

    out: Path
    text: Path
    locks: dict[int, Path]

    @property
    def results(self) -> Path:
        return self.out / "results.jsonl"

    def run(self, name: str) -> Path:
        return self.out / "runs" / name


def job_file(job: Job, plan: Plan, place: Place) -> dict[str, dict[str, Any]]:
    """The sections of the trainer's job file of one run; a seed has batches of its own in the trunk."""
    stage, steps = plan.stages[job.stage], plan.steps(job.stage)
    batch = max(1, stage.batch_tokens // stage.seq_len)
    first = 0 if job.stage else job.seed * steps * batch
    checkpoint: dict[str, Any] = {"keep_latest_k": 2}
    if job.parent:
        start = place.run(job.parent) / f"checkpoint/step-{plan.steps(job.stage - 1)}"
        checkpoint |= {"initial_load_path": str(start), "allow_changes": CHANGES, "allow_fresh_start": False}
    own: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": str(place.run(job.name))},
        "architecture": job.model,
        "model": {"mask_documents": True},
        "mixture": {"lock": str(place.locks[stage.seq_len])},
        "training": {
            "steps": steps, "seq_len": stage.seq_len, "global_batch_size": batch, "local_batch_size": batch,
        },
        "validation": {"enable": False},
        "optimizer": {"lr": stage.learning_rate},
        "lr_scheduler": {"warmup_steps": max(1, steps // 20)},
        "compile": {"enable": True, "backend": stage.compile} if stage.compile else {"enable": False},
        "checkpoint": checkpoint,
        "resilience": {"skip_sequences": [[0, first]] if first else []},
        "debug": {"seed": job.seed + 1},
    }  # fmt: skip
    return with_sections(plan.job, own)


def trained(job: Job, plan: Plan, place: Place) -> int:
    """Train a run to its end, unless it has ended; its exit code."""
    run = place.run(job.name)
    path = run / "job.toml"
    write_job(path, job_file(job, plan, place))
    code = (read_outcome(run) or {}).get("code")
    if code == BAD_STEP or (code == DONE and newest_complete_checkpoint(run / "checkpoint")):
        return int(code)
    one_thread = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return train(path, ends=(DONE, BAD_STEP), log=run / "train.log", environment=one_thread)


def origin_of(job: Job, plan: Plan, place: Place) -> dict[str, Any]:
    """What a kept result has to come from."""
    stage = plan.stages[job.stage]
    data = Mixture.open(place.locks[stage.seq_len]).fingerprint
    return {"model": job.model, "stage_of": asdict(stage), "data": data}


def run_group(jobs: list[Job], plan: Plan, place: Place) -> None:
    """Train and measure what the results do not hold yet, in order; then what the runs kept is removed.

    A trunk whose result is there and whose weights are gone, as where another machine trained it, is trained again.
    ValueError for a run that fails, or for results of another training or other data.
    """
    done = {result["name"]: result for result in read_lines(place.results)}
    for job in jobs:
        if job.name in done:
            same_origin([done[job.name]], origin_of(job, plan, place), place.results)
    for job in jobs:
        if job.name not in done:
            chain = [
                each
                for each in jobs
                if each.stage == 0 or (each.rope == job.rope and each.stage <= job.stage)
            ]
            codes = [trained(each, plan, place) for each in chain]
            append_line(place.results, json.dumps(result_of(job, codes, plan, place)))
        if job.stage == len(plan.stages) - 1:  # nothing branches from it
            for stage in range(1, len(plan.stages)):
                shutil.rmtree(place.run(job.name_of(stage)) / "checkpoint", ignore_errors=True)
    shutil.rmtree(place.run(jobs[0].name) / "checkpoint", ignore_errors=True)


def result_of(job: Job, codes: list[int], plan: Plan, place: Place) -> dict[str, Any]:
    last = (read_lines(place.run(job.name) / "metrics.jsonl") or [{}])[-1]
    lengths = [stage.seq_len for stage in plan.stages[: job.stage + 2]]
    lock, found = place.locks[plan.stages[job.stage].seq_len], {}
    if set(codes) == {DONE}:
        found = measured(place.run(job.name), plan.steps(job.stage), place.text, lock, lengths, plan.scored)
    return {
        "name": job.name, "delay": job.delay, "layout": job.layout, "seed": job.seed, "rope": job.rope,
        "stage": job.stage, "train_loss": last.get("loss"), "seconds": 3600 * last.get("gpu_hours", 0.0), **found,
        **origin_of(job, plan, place), "commit": code_version(ROOT), "time": time.time(),
    }  # fmt: skip
