"""A torchrun of the fork server against the real one: what ranks find at their start, exit statuses, and signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.train.runs import ask
from train.supervise.attempt import hold_port

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.rotate


def start(kind: str, folder: Path, how: str, meanwhile: Callable[[Path], None]) -> int:
    """The exit status of a torchrun of two ranks (tests/train/rank.py); kind: "real" or "forked"."""
    folder.mkdir()
    log, pid = folder.with_suffix(".log"), folder.with_suffix(".pid")
    with hold_port() as holder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--node-rank=0",
            "--rdzv-backend=static", f"--rdzv-endpoint=localhost:{holder.getsockname()[1]}", "--tee=3",
            f"--log-dir={folder / 'logs'}", "-m", "tests.train.rank", str(folder), how,
        ]  # fmt: skip
        env = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "GIVEN": "a value"}
        if kind == "forked":
            job = {"command": command, "environment": env, "log": str(log), "pid": str(pid)}
            return ask(job, lambda: meanwhile(folder))
        with open(log, "wb") as said:
            process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=said, stderr=said)
            pid.write_text(str(process.pid))
            meanwhile(folder)
            return process.wait(300)


def lives(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(what: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + 300
    while not what():
        assert time.monotonic() < deadline_s, "nothing happened"
        time.sleep(0.01)


def nothing(folder: Path) -> None:
    pass


def terminate(folder: Path) -> None:
    """A signal to torchrun once it passes on all streams: one that comes while it starts their threads hangs it."""
    lines = [f"rank {rank} {what}" for rank in range(2) for what in ("says hello", "warns")]
    log = folder.with_suffix(".log")
    wait_for(lambda: log.exists() and all(line in log.read_text() for line in lines))
    os.kill(int(folder.with_suffix(".pid").read_text()), signal.SIGTERM)


def facts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank.{rank}.json").read_text()) for rank in range(2)]


def root_cause(folder: Path) -> list[tuple[str, ...]]:
    """What torchrun says of the first rank to fail."""
    text = folder.with_suffix(".log").read_text()
    return re.findall(r"Root Cause.*?rank +: (\d+).*?exitcode +: (-?\d+)", text, re.DOTALL)


@pytest.mark.parametrize(
    ("how", "meanwhile", "status", "cause"),
    [
        ("well", nothing, 0, []),
        ("fail", nothing, 1, [("1", "3")]),
        ("killed", nothing, 1, [("1", "-9")]),
        ("wait", terminate, 1, []),
    ],
    ids=["well", "fail", "killed", "terminated"],
)
def test_it_ends_as_the_real_one(
    tmp_path: Path, how: str, meanwhile: Callable[[Path], None], status: int, cause: list
) -> None:
    real, forked = tmp_path / "real", tmp_path / "forked"
    statuses = [start(folder.name, folder, how, meanwhile) for folder in (real, forked)]
    log = forked.with_suffix(".log").read_text()
    assert statuses == [status, status], log
    assert root_cause(real) == root_cause(forked) == cause, log
    if how != "wait":  # torchrun passes on what its ranks say, and keeps it
        assert "[default1]:rank 1 says hello" in log
        (copy,) = (forked / "logs").rglob("1/stdout.log")
        assert copy.read_text() == "rank 1 says hello\n"
    changing = {"pid", "parent"}
    for theirs, ours in zip(facts(real), facts(forked), strict=True):
        assert ours["parent"] == int(forked.with_suffix(".pid").read_text()), "a rank is torchrun's child"
        assert ours["leads_its_group"]
        assert {name for name in ours if ours[name] != theirs[name]} <= changing
        wait_for(lambda pid=ours["pid"]: not lives(pid))


def test_a_job_whose_test_is_over_ends_and_answers_nobody(tmp_path: Path) -> None:
    """pytest's time limit raises within `ask`: the job would go on in a folder that its test has left."""

    def give_up(folder: Path) -> None:
        wait_for((folder / "rank.1.json").exists)
        raise TimeoutError

    with pytest.raises(TimeoutError):
        start("forked", tmp_path / "left", "wait", give_up)
    wait_for(lambda: not lives(facts(tmp_path / "left")[1]["pid"]))
    assert start("forked", tmp_path / "next", "fail", nothing) == 1
