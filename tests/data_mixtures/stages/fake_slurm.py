"""squeue, sbatch, scancel and scontrol without a cluster, for faults that a real one shows rarely.

The folder of these programs is the cluster: `log` has every command, `jobs/<job>_<task>` is a task in the
queue. A file `squeue.fails` or `sbatch.fails` has the number of times that the program still fails, as after
a time-out. Tasks run one after another; a file `held` keeps all of them pending.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

NAMES = ("squeue", "sbatch", "scancel", "scontrol")


def install(folder: Path, max_array_size: int = 1001) -> Path:
    """Make the programs in a new folder, to be put first in PATH."""
    (folder / "jobs").mkdir(parents=True)
    (folder / "size").write_text(str(max_array_size))
    for name in NAMES:
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} -S {__file__} {folder} {name} "$@"\n')
        (folder / name).chmod(0o755)
    (folder / "log").touch()
    return folder


def fail(folder: Path, name: str, times: int) -> None:
    (folder / f"{name}.fails").write_text(str(times))


def commands(folder: Path, name: str) -> list[str]:
    return [line for line in (folder / "log").read_text().splitlines() if line.startswith(name)]


def main(folder: Path, name: str, *arguments: str) -> int:
    with (folder / "log").open("a") as log:
        log.write(" ".join([name, *arguments]).replace("\n", " ") + "\n")
    if name == "scontrol":
        print(f"MaxArraySize            = {(folder / 'size').read_text()}\nSchedulerParameters     = defer")
    elif name == "sbatch":
        _submit(folder, dict(each[2:].split("=", 1) for each in arguments if "=" in each))
    elif name == "scancel":
        for task in arguments:
            (folder / "jobs" / task).unlink()
    fails = folder / f"{name}.fails"
    if fails.is_file() and (left := int(fails.read_text())):
        fails.write_text(str(left - 1))
        print(f"{name}: error: Socket timed out on send/recv operation", file=sys.stderr)
        return 1
    if name == "squeue":
        for task in sorted((folder / "jobs").iterdir()):
            with suppress(FileNotFoundError):  # just finished
                print(task.name, task.read_text().strip())
    return 0


def _submit(folder: Path, options: dict[str, str]) -> None:
    job = len(commands(folder, "sbatch"))
    last, limit = map(int, re.fullmatch(r"0-(\d+)%(\d+)", options["array"]).groups())
    assert limit > 0
    assert last < int((folder / "size").read_text()), "sbatch: error: Invalid job array specification"
    tasks = [folder / "jobs" / f"{job}_{index}" for index in range(last + 1)]
    for task in tasks:
        task.write_text(f"PD {options['job-name']}\n")
    command = [
        sys.executable,
        "-S",
        __file__,
        str(folder),
        "tasks",
        options["output"],
        options["wrap"],
        *map(str, tasks),
    ]
    silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.Popen(command, start_new_session=True, **silent)
    print(f"Submitted batch job {job}")


def run_tasks(output: str, script: str, tasks: list[Path]) -> None:
    held, deadline = tasks[0].parents[1] / "held", time.monotonic() + 120
    for task in tasks:
        while held.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        if not task.exists():
            continue
        task.write_text(task.read_text().replace("PD ", "R "))
        index = task.name.partition("_")[2]
        with open(output.replace("%a", index), "a") as log:
            subprocess.run(
                ["env", f"SLURM_ARRAY_TASK_ID={index}", "sh", "-c", script], stdout=log, stderr=log
            )
        task.unlink(missing_ok=True)


if __name__ == "__main__":
    if sys.argv[2] == "tasks":
        run_tasks(sys.argv[3], sys.argv[4], [Path(each) for each in sys.argv[5:]])
    else:
        sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
