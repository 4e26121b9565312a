"""Break a job from the inside, on schedule; tests load this by `experimental.custom_import`.

LANEFORMER_FAULTS names a JSON file: a list of {"kind", "step", "rank"}. Each happens once in the
life of a run, however often the job starts, as the first to do it leaves a mark beside the plan.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.checkpoint import _async_process_executor
from torchtitan.distributed import utils as dist_utils

import train.spec  # noqa: F401 - what custom_import names otherwise
from records.checkpoints import step_folders
from records.files import read_json
from train import failed_saves
from train.checkpoint_writer import HashingWriter
from train.supervise.heartbeat import Heartbeat
from train.supervise.signals import WORKER
from train.trainer import LaneformerTrainer

PLAN = Path(os.environ["LANEFORMER_FAULTS"])
# the supervisor's check of the settings has none
RANK = int(os.environ.get("RANK", "0"))
FULL_DISK_STEPS = 3
# step until which files may not grow
limited_until: int | None = None
# what this rank told its heartbeat
marks: list[str] = []
enter, close = Heartbeat.enter, Heartbeat.close
train_step, finish = LaneformerTrainer.train_step, HashingWriter.finish
clip_grad_norm_ = dist_utils.clip_grad_norm_
# a full disk is tried at every step
failed_saves.RETRY_S = 0.0


def find_due_fault(step: int, of_save: bool = False) -> str | None:
    """Return the fault that this rank commits now, in a step or its save, and mark it done."""
    for index, fault in enumerate(read_json(PLAN)):
        if (
            fault["step"] == step
            and fault["kind"].startswith("kill_all") == of_save
            and fault["rank"] in (RANK, None)
        ):
            try:
                PLAN.with_suffix(f".{index}.{RANK}.done").touch(exist_ok=False)
            except FileExistsError:
                continue
            return fault["kind"]
    return None


def fill(path: Path) -> None:
    """Write until no byte fits; RuntimeError for a disk larger than a test's."""
    if (disk := shutil.disk_usage(path.parent)).total > 64 << 20:
        raise RuntimeError(
            f"{path.parent} is on a disk of {disk.total} bytes, expected the test's small one"
        )
    with open(path, "wb", buffering=0) as file:
        for size_bytes in (1 << 16, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size_bytes))


def kill_all() -> None:
    # both workers at once, this one last
    beats = [read_json(p) for p in (run_folder() / "heartbeats").glob("rank-*.json")]
    for beat in sorted(beats, key=lambda beat: beat["pid"] == os.getpid()):
        os.kill(beat["pid"], signal.SIGKILL)


def run_folder() -> Path:
    return PLAN.parent / "run"


def break_step(self: LaneformerTrainer, data_iterator: Any) -> None:
    # the fault comes between the backward pass and the clipping of the gradients
    def clip(*arguments: Any, **options: Any) -> torch.Tensor:
        commit(self)
        return clip_grad_norm_(*arguments, **options)

    dist_utils.clip_grad_norm_ = clip
    train_step(self, data_iterator)


def commit(self: LaneformerTrainer) -> None:
    global limited_until
    if limited_until == self.step:
        if self.checkpointer.save_future is not None:
            wait([self.checkpointer.save_future])
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    saving = getattr(self.checkpointer, "save_future", None)  # none without checkpoint.enable
    if saving is not None and any(fault["step"] == self.step for fault in read_json(PLAN)):
        # what kills in that save comes first, else this fault is lost with it
        wait([saving])
    kind = find_due_fault(self.step)
    if kind in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    elif kind in ("usr1", "sigterm_step"):
        # as Slurm signals all processes of a step
        if kind == "sigterm_step":
            for process in psutil.Process().children(recursive=True):
                process.terminate()
        os.kill(os.getpid(), signal.SIGUSR1)
        while WORKER.request is None:
            time.sleep(0.01)
    elif kind == "kill_writer":  # as the kernel does when memory runs out
        wait([self.checkpointer.save_future])
        _async_process_executor._CHECKPOINT_PROCESS._save_process.kill()
    elif kind == "nan":
        next(self.model_parts[0].parameters()).grad.mul_(float("nan"))
    elif kind == "truncate":  # as a file system does that lost its last pages in a power cut
        # on one rank alone this would never return: the plan names no rank
        self.checkpointer.wait_for_save()
        torch.distributed.barrier()
        if RANK == 0:
            newest = next(iter(step_folders(Path(self.checkpointer.folder)).values()))
            victim = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
            os.truncate(victim, victim.stat().st_size // 2)
            kill_all()
        signal.pause()
    elif kind == "full_disk":  # the kernel refuses to write more, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
        limited_until = self.step + FULL_DISK_STEPS
    elif kind == "fill_disk":  # really: the test has mounted a small one
        if RANK == 0:
            fill(run_folder() / "ballast")
        torch.distributed.barrier()
    elif kind == "empty_disk":
        (run_folder() / "ballast").unlink(missing_ok=True)
    elif kind == "sigterm_supervisor":
        os.kill(int((run_folder().parent / "supervisor.pid").read_text()), signal.SIGTERM)
        # steps are faster than the supervisor's looks
        while not (run_folder() / "stop").exists():
            time.sleep(0.05)


def break_finish(self: HashingWriter, metadata: Any, results: Any) -> None:
    # rank 0 writes .metadata here, when all data files are written
    kind = find_due_fault(int(self.path.name.removeprefix("step-")), of_save=True)
    if kind == "kill_all_before_metadata":
        kill_all()
    finish(self, metadata, results)
    if kind == "kill_all_after_metadata":
        kill_all()


def note_enter(self: Heartbeat, what: str) -> None:
    marks.append(what)
    enter(self, what)


def note_close(self: Heartbeat) -> None:
    PLAN.with_name(f"marks.{RANK}.json").write_text(json.dumps(marks))
    close(self)


Heartbeat.enter, Heartbeat.close = note_enter, note_close
LaneformerTrainer.train_step = break_step
HashingWriter.finish = break_finish
