"""A torchrun of the fork server against the real one: what ranks find at their start, and exit statuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tools.launch.slurm_cluster import wait_for
from tests.train.runs import ask
from train.supervise.attempt import hold_port

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.rotate


def start(kind: str, folder: Path) -> int:
    """The exit status of a torchrun of two ranks (tests/train/rank.py); kind: "real" or "forked"."""
    folder.mkdir()
    log, pid = folder.with_suffix(".log"), folder.with_suffix(".pid")
    with hold_port() as holder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--node-rank=0",
            "--rdzv-backend=static", f"--rdzv-endpoint=localhost:{holder.getsockname()[1]}", "--tee=3",
            f"--log-dir={folder / 'logs'}", "-m", "tests.train.rank", str(folder),
        ]  # fmt: skip
        env = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "GIVEN": "a value"}
        if kind == "forked":
            return ask({"command": command, "environment": env, "log": str(log), "pid": str(pid)})
        with open(log, "wb") as said:
            process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=said, stderr=said)
            pid.write_text(str(process.pid))
            return process.wait(300)


def lives(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def facts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank.{rank}.json").read_text()) for rank in range(2)]


def test_ranks_start_and_fail_as_those_of_the_real_one(tmp_path: Path) -> None:
    real, forked = tmp_path / "real", tmp_path / "forked"
    statuses = [start(folder.name, folder) for folder in (real, forked)]
    log = forked.with_suffix(".log").read_text()
    assert statuses == [1, 1], log
    for path in (real, forked):
        failure = r"Root Cause.*?rank +: 1 .*?exitcode +: 3 "
        assert re.search(failure, path.with_suffix(".log").read_text(), re.DOTALL), log
    # torchrun passes on what its ranks say, and keeps it
    assert "[default1]:rank 1 says hello" in log
    (copy,) = (forked / "logs").rglob("1/stdout.log")
    assert copy.read_text() == "rank 1 says hello\n"
    for theirs, ours in zip(facts(real), facts(forked), strict=True):
        assert ours["parent"] == int(forked.with_suffix(".pid").read_text()), "a rank is torchrun's child"
        assert ours["leads_its_group"]
        assert {name for name in ours if ours[name] != theirs[name]} <= {"pid", "parent"}
        wait_for(lambda pid=ours["pid"]: not lives(pid), "the end of a rank", 300)
