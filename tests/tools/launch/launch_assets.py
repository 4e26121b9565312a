"""Make a checkout to launch from: the code under test as a git repository that a test may edit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from records.job import job_flags
from tests.train import runs
from tools.launch.script import Cluster, batch_script

ROOT = Path(__file__).resolve().parents[3]
# train/paced.py slows the steps down until the file PACED_CODE.fast exists, and notes which code a
# worker runs
PACED = '''
"""The Laneformer with a pause before every read, and a note of the code that runs."""
import os, time
import laneformer
import train.spec
from train.data import MixtureLoader

if "RANK" in os.environ and "PACED_CODE" in os.environ:
    with open(os.environ["PACED_CODE"], "a") as file:
        file.write(laneformer.__file__ + "\\n")
read = MixtureLoader._read

def slow_read(self, *what):
    if not os.path.exists(os.environ.get("PACED_CODE", "") + ".fast"):
        time.sleep(float(os.environ.get("PACED_SECONDS", "0")))
    return read(self, *what)

MixtureLoader._read = slow_read
'''
ARCHITECTURE = {f"architecture.{name}": value for name, value in runs.ARCHITECTURE.items()}
SETTINGS = {
    "training.seq_len": runs.SEQ_LEN,
    "training.global_batch_size": 4,
    "training.local_batch_size": 2,
    "lr_scheduler.warmup_steps": 2,
    "lr_scheduler.decay_ratio": 0.25,
    "architecture.swa_layers": (0, 1, 2),
    "checkpoint.async_mode": "disabled",
    "experimental.custom_import": "train.paced",
    "training.steps": 40,
    "checkpoint.interval": 8,
}
SMALL = (*job_flags(ARCHITECTURE | SETTINGS), "--metrics.no-enable_tensorboard")


def make_checkout(folder: Path) -> Path:
    # files that are not committed yet are under test as well
    listed = git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / "train/paced.py").write_text(PACED)
    git(folder, "init", "-q")
    commit(folder, "as tested")
    return folder


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "--all")
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    git(folder, *identity, "commit", "-q", "-m", message)


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
    ).stdout


def environment() -> dict[str, str]:
    # without PYTHONPATH, so that an editable install's hook applies; and the tests may run inside of a Slurm job
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SLURM"))}
    return {**variables, "OMP_NUM_THREADS": "1"}


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def stand_in_script(run: Path, supervisor: str, cluster: Cluster) -> Path:
    """Return the batch script of a snapshot whose Python is the shell script `supervisor`."""
    snapshot = run / "snap"
    (snapshot / "code").mkdir(parents=True)
    write_program(snapshot / "env/bin/python", supervisor)
    write_program(snapshot / "submit.sbatch", batch_script(snapshot, run, cluster, None))
    subprocess.run("sha256sum submit.sbatch > SHA256SUMS", shell=True, cwd=snapshot, check=True)
    return snapshot / "submit.sbatch"


def launch(
    checkout: Path, *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tools.launch", *arguments]
    return subprocess.run(
        command, cwd=checkout, env=env or environment(), capture_output=True, text=True, timeout=900
    )
