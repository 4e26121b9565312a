"""Start a run on a cluster or on this machine: an isolated snapshot, a batch script, `sbatch`.

    python -m tools.launch configs/phase1.toml --nodes 24 --gpus-per-node 8 --spares 1 [--training.steps 1000 ...]
    python -m tools.launch --phase-switch runs/phase1 --config configs/phase2.toml     # queued after phase 1
    python -m tools.launch --decay-from runs/phase1/checkpoint/step-400000 --steps 40000

A run launched from another inherits its Slurm options. Unknown options are passed to TorchTitan.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from records.checkpoints import (
    check_is_checkpoint,
    locate_checkpoint,
    newest_saved_step,
    run_folder,
)
from records.command import Count, check_ranges, refuse_unknown_options, run_command
from records.files import append_line, read_lines
from records.job import JobSections, read_job, stable_range
from tools.launch.script import ENDED, Cluster, batch_script, check_cluster, job_state, submit
from tools.launch.snapshot import remove, resolve_job, take_snapshot

# set by the launcher: other values would lead the job out of its run folder and snapshot
OWNED = ("--job.dump_folder", "--job.config_file", "--job.config-file", "--job.dump-folder")
PROG = "python -m tools.launch"
console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)


@dataclass(frozen=True)
class Options:
    """Launch a run: snapshot, batch script, sbatch. Other --section.key value pairs are passed to TorchTitan."""

    config: Path | None = None
    """Job file, also accepted as the first argument; with --phase-switch, the job file of the next phase"""
    run: str | None = None
    """Name of the run, or a path to its folder; default: the job file's job.dump_folder"""
    phase_switch: Path | None = None
    """Run folder; the new run starts from its last checkpoint, once its job has succeeded"""
    decay_from: Path | None = None
    """Checkpoint (RUN/checkpoint/step-N) from which the learning rate decays to its minimum over --steps"""
    steps: Count | None = None
    """Number of steps of the decay"""

    dependency: str | None = None
    """Slurm's --dependency, e.g. afterok:1234"""
    allow_dirty: bool = False
    """Launch with uncommitted changes, which are kept in the snapshot"""
    dry_run: bool = False
    """Print what would run without creating anything"""
    local: bool = False
    """Run on this machine, without Slurm, from the same kind of snapshot"""
    cluster: tyro.conf.OmitArgPrefixes[Cluster] = field(default_factory=Cluster)


@dataclass(frozen=True)
class Start:
    """How a new run begins."""

    config: Path
    overrides: list[str] = field(default_factory=list)
    # run folder
    parent: Path | None = None
    # step folder, which a running parent may not have written yet
    checkpoint: str | None = None
    dependency: str | None = None
    # folder of the new run, if its name derives from the parent's
    run: Path | None = None
    # data that the parent skips, and so must the branch
    skip_list: Path | None = None


def main() -> None:
    arguments = sys.argv[1:]
    if arguments and not arguments[0].startswith("-"):
        arguments.insert(0, "--config")
    options, overrides = parse_options(arguments, Options())
    # what the parent was launched with is the default then
    if inherited := read_parents_cluster(options):
        options, overrides = parse_options(arguments, Options(cluster=inherited))
    launch(options, overrides)


def parse_options(arguments: list[str], default: Options) -> tuple[Options, list[str]]:
    """Return the launcher's options and the trainer's; ValueError for what is neither."""
    options, overrides = tyro.cli(
        Options, args=arguments, prog=PROG, default=default, return_unknown_args=True
    )
    refuse_unknown_options(overrides)
    if owned := [argument for argument in overrides if argument.split("=")[0] in OWNED]:
        raise ValueError(
            f"{owned[0]} is set by the launcher; give the run folder as --run, the job file as an argument"
        )
    check_ranges(Options, vars(options))
    return options, list(overrides)


def launch(options: Options, overrides: list[str]) -> None:
    """Take the snapshot, write the script, submit it; ValueError before anything is queued."""
    start = choose_start(options)
    run = folder_of(options, start)
    cluster = options.cluster
    check_cluster(cluster)
    ranks = cluster.nodes * cluster.gpus_per_node
    all_overrides = [*start.overrides, *overrides]
    if not options.dry_run:
        refuse_second_job(run)
    dependency = ",".join(filter(None, (options.dependency, start.dependency))) or None
    # a job that this one waits for may still write its checkpoint
    if not dependency:
        check_parent(run, start.config, all_overrides)

    def script(snapshot: Path) -> str:
        return batch_script(snapshot, run, cluster, None if options.local else dependency)

    if options.dry_run:
        resolve_job(None, run, start.config, all_overrides, ranks)
        words = " ".join(all_overrides) or "none"
        console.print(f"run folder   {run}\njob file     {start.config}\noverrides    {words}")
        if start.checkpoint:
            console.print(f"starts from  {start.checkpoint}")
        print(script(run / "snapshot/<time>-<commit>"))
        return
    if not options.local and not shutil.which("sbatch"):
        raise ValueError(
            "sbatch is not installed; launch from a login node, or with --local or --dry-run"
        )
    snapshot = take_snapshot(run, start.config, all_overrides, ranks, options.allow_dirty, script)
    # before the job can start: it reads the list of its run folder
    if start.skip_list is not None:
        shutil.copy(start.skip_list, run)
    try:
        job_id = None if options.local else submit(snapshot / "submit.sbatch")
    except ValueError:
        # nothing runs from it
        remove(snapshot)
        raise
    record = {
        "time": time.time(),
        "job_id": job_id,
        "snapshot": str(snapshot),
        "cluster": dataclasses.asdict(cluster),
        "dependency": dependency,
        "parent": str(start.parent) if start.parent else None,
        "started_from": start.checkpoint,
        "config": str(start.config),
        "overrides": overrides,
    }
    append_line(run / "launches.jsonl", json.dumps(record))
    if options.local:
        console.print(f"running here; run folder {run}, snapshot {snapshot}")
        sys.exit(subprocess.run(["bash", str(snapshot / "submit.sbatch")]).returncode)
    console.print(
        f"job {job_id}{f' ({dependency})' if dependency else ''}\n  run       {run}\n  snapshot  {snapshot}\n"
        f"  log       {run}/slurm-{job_id}.log"
    )
    print(json.dumps({"job_id": job_id, "run": str(run), "snapshot": str(snapshot)}))


def check_parent(run: Path, config: Path, overrides: list[str]) -> None:
    """Raise ValueError where a new run is to start from a missing checkpoint."""
    job = read_job(["--job.config_file", str(config), *overrides])
    parent = job.checkpoint.initial_load_path
    if parent and newest_saved_step(run / job.checkpoint.folder) < 0:
        check_is_checkpoint(Path(parent))


def choose_start(options: Options) -> Start:
    """Return the job file and what the run begins with; ValueError for options that conflict."""
    config = options.config
    if options.phase_switch and options.decay_from:
        raise ValueError("--phase-switch and --decay-from exclude each other")
    if (options.steps is None) != (options.decay_from is None):
        raise ValueError(
            "--decay-from and --steps belong together: the start and the length of the decay"
        )
    if options.phase_switch:
        return next_phase(options.phase_switch.resolve(), config or Path("configs/phase2.toml"))
    if options.decay_from:
        if config:
            raise ValueError(f"--decay-from uses the run's own job file; remove {config}")
        assert options.steps is not None
        return decay_branch(options.decay_from, options.steps)
    if config is None:
        raise ValueError(
            "no job file; for example: python -m tools.launch configs/phase1.toml --nodes 24 ..."
        )
    return Start(config)


def folder_of(options: Options, start: Start) -> Path:
    """Return --run, else the branch's name, else job.dump_folder; ValueError for the parent's."""
    if not start.config.is_file():
        raise ValueError(f"job file {start.config} does not exist")
    if options.run:
        folder = Path(options.run) if "/" in options.run else Path("runs") / options.run
    else:
        folder = start.run or read_job(["--job.config_file", str(start.config)]).run
    if start.parent and folder.resolve() == start.parent.resolve():
        raise ValueError(f"{folder} is the run to start from; name the new one with --run")
    return folder.resolve()


def read_parents_cluster(options: Options) -> Cluster | None:
    """Return the Slurm options of the run to start from; None without one."""
    run = options.phase_switch or (options.decay_from and run_folder(options.decay_from))
    values = (last_launch(run) or {}).get("cluster") if run else None
    if not values:
        return None
    # older launches wrote null for the default
    stated = {name: value for name, value in values.items() if value is not None}
    return Cluster(**stated | {"env": tuple(stated.get("env", ()))})


def refuse_second_job(run: Path) -> None:
    """Raise ValueError if the run folder has an unfinished job."""
    # two jobs in one run folder would overwrite each other's checkpoints
    before = last_launch(run)
    if (
        before
        and before["job_id"] is not None
        and (state := job_state(before["job_id"])) not in ENDED
    ):
        raise ValueError(
            f"job {before['job_id']} of {run} is {state}; scancel it first, or choose another --run"
        )


# --- runs that start from another run


def last_launch(run: Path) -> dict[str, Any] | None:
    """Return the last row of launches.jsonl; None for a run that tools.launch did not start."""
    return next(reversed(read_lines(run / "launches.jsonl")), None)


def read_resolved_job(run: Path) -> tuple[Path, JobSections]:
    """Return a run's job file: its newest launch's, else its workers'; ValueError without one."""
    launch = last_launch(run)
    path = Path(launch["snapshot"]) / "job.toml" if launch else run / "config.toml"
    if not path.is_file():
        raise ValueError(f"{run} is not a run folder: {path} does not exist")
    return path, read_job(["--job.config_file", str(path)])


def final_checkpoint(run: Path) -> Path:
    """Return the path of a run's final checkpoint, which need not exist."""
    return run / f"checkpoint/step-{read_resolved_job(run)[1].training.steps}"


def next_phase(run: Path, config: Path) -> Start:
    """Return a phase from the final checkpoint of `run`, queued after its job if unfinished.

    ValueError if the checkpoint does not exist and no job will write it.
    """
    checkpoint = final_checkpoint(run)
    job_id = (last_launch(run) or {}).get("job_id")
    exists = (checkpoint / ".metadata").is_file()
    state = job_state(job_id) if job_id is not None and not exists else None
    if not exists and state in ENDED:
        job = f"job {job_id} is {state or 'forgotten'}" if job_id else "no job"
        raise ValueError(
            f"{checkpoint} does not exist, and {job} that would write it; finish that run first"
        )
    overrides = ["--checkpoint.initial_load_path", str(checkpoint)]
    return Start(config, overrides, run, str(checkpoint), None if exists else f"afterok:{job_id}")


def decay_branch(checkpoint: Path, steps: int) -> Start:
    """Return a copy of a run from a checkpoint on, with the learning rate's decay over `steps`."""
    checkpoint = locate_checkpoint(checkpoint)
    run = checkpoint.parent.parent
    job_file, job = read_resolved_job(run)
    match = re.fullmatch(r"step-(\d+)", checkpoint.name)
    if not match:
        raise ValueError(f"{checkpoint} is not a checkpoint; pass RUN/checkpoint/step-N")
    at = int(match[1])
    first, last = stable_range(job.lr_scheduler, job.training.steps)
    if not first <= at <= last:
        raise ValueError(
            f"step {at} of {run} is not in the stable part of its schedule, steps {first} to {last}; a decay starts at "
            "the full learning rate"
        )
    # the schedule is rebuilt from the job file at every start, so numbers suffice; TorchTitan
    # reaches the minimum one step after total_steps, so one less reaches it at the last step of the
    # run
    total = at + steps - 1
    overrides = [
        "--training.steps",
        str(at + steps),
        "--lr_scheduler.total_steps",
        str(total),
        "--lr_scheduler.decay_ratio",
        repr(steps / total),
        "--checkpoint.initial_load_path",
        str(checkpoint),
        "--checkpoint.initial_load_all_states",
        "--checkpoint.no-allow_fresh_start",
    ]
    branch = run.with_name(f"{run.name}-decay-{at}+{steps}")
    skip_list = next(run.glob("skip_sequences.json"), None)
    return Start(job_file, overrides, run, str(checkpoint), None, branch, skip_list)


if __name__ == "__main__":
    run_command("tools.launch", main)
