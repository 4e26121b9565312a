"""Keep a training job running: restart it from the newest checkpoint after crashes, hangs and bad steps.

    python -m train.supervise --job.config_file configs/phase1.toml [--nproc-per-node N]
                              [--nodes a,b,c --spares K] [--section.key value ...]

All other flags are passed to every attempt of `python -m train`. Exit status: 0 (training.steps reached),
85 (stopped on request with a checkpoint saved; start again to continue), 84 (stopped on request, but the
newest checkpoint is an older one), 86 (the guard refused a step and the policy is to stop), or 1
(restarting does not help).
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import tyro

from records.job import read_job

from .lock import hold_run, require_no_ranks
from .supervisor import Options, Supervisor


def main() -> int:
    """Parse the supervisor's own flags; the rest is the job's."""
    options, train_arguments = tyro.cli(
        Options, prog="python -m train.supervise", description=__doc__, return_unknown_args=True
    )
    try:
        job = read_job(train_arguments)
        # before the check, which takes seconds: two supervisors would both pass it
        run_lock = hold_run(job.run)
        require_no_ranks(job.run)
        refuse_impossible(train_arguments)
    except ValueError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    options = dataclasses.replace(
        options, nproc_per_node=options.nproc_per_node or max(1, count_gpus())
    )
    with run_lock:
        return Supervisor(job, options, train_arguments).run()


def refuse_impossible(train_arguments: list[str]) -> None:
    # in a process of its own: the check imports torch, which the supervisor does without
    command = [sys.executable, "-m", "train.job_config", *train_arguments]
    check = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    stderr = check.stderr.strip()
    # 2: a flag that does not parse; other failures may be gone next time
    if check.returncode == 2 or (check.returncode and "the job is refused: " in stderr):
        raise ValueError(stderr if check.returncode == 2 else stderr.splitlines()[-1])


def count_gpus() -> int:
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    sys.exit(main())
