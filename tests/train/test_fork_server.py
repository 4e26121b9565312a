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

from tests.train.runs import ask, environment
from train.supervise.attempt import free_port

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.rotate


def command(folder: Path, how: str) -> list[str]:
    folder.mkdir()
    torchrun = ["--nnodes=1", "--nproc-per-node=2", "--rdzv-backend=static", "--node-rank=0", "--tee=3"]
    torchrun += [f"--rdzv-endpoint=localhost:{free_port()}", f"--log-dir={folder / 'logs'}"]
    rank = ["-m", "tests.train.rank", str(folder), how]
    return [sys.executable, "-m", "torch.distributed.run", *torchrun, *rank]


def real(folder: Path, how: str, meanwhile: Callable[[Path], None]) -> int:
    with open(folder.with_suffix(".log"), "wb") as log:
        env = {**os.environ, **environment(), "GIVEN": "a value"}
        with subprocess.Popen(command(folder, how), cwd=ROOT, env=env, stdout=log, stderr=log) as process:
            folder.with_suffix(".pid").write_text(str(process.pid))
            meanwhile(folder)
            return process.wait(60)


def forked(folder: Path, how: str, meanwhile: Callable[[Path], None]) -> int:
    places = {"log": str(folder.with_suffix(".log")), "pid": str(folder.with_suffix(".pid"))}
    env = {
        **os.environ,
        **environment(),
        "GIVEN": "a value",
    }  # imports have added to this process's since the fork
    job = {"command": command(folder, how), "environment": env, **places}
    return ask(job, lambda: meanwhile(folder))


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


def signal_it(folder: Path, number: int) -> None:
    """A signal to torchrun once it passes on all streams: one that comes while it starts their threads hangs it."""
    said = [f"rank {rank} {what}" for rank in range(2) for what in ("says hello", "warns")]
    log = folder.with_suffix(".log")
    wait_for(lambda: log.exists() and all(line in log.read_text() for line in said))
    os.kill(int(folder.with_suffix(".pid").read_text()), number)


def terminate(folder: Path) -> None:
    signal_it(folder, signal.SIGTERM)


def kill(folder: Path) -> None:
    signal_it(folder, signal.SIGKILL)


def facts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank.{rank}.json").read_text()) for rank in range(2)]


def report(folder: Path) -> list[tuple[str, ...]]:
    """What torchrun says of the first rank to fail."""
    text = folder.with_suffix(".log").read_text()
    return re.findall(r"Root Cause.*?rank +: (\d+).*?exitcode +: (-?\d+)", text, re.DOTALL)


@pytest.mark.parametrize(
    ("how", "meanwhile", "status", "cause"),
    [
        ("well", nothing, 0, []),
        ("fail", nothing, 1, [("1", "3")]),
        ("raise", nothing, 1, [("1", "1")]),
        ("killed", nothing, 1, [("1", "-9")]),
        ("wait", terminate, 1, []),
        ("wait", kill, -signal.SIGKILL, []),
    ],
    ids=["well", "fail", "raise", "killed", "terminated", "torchrun killed"],
)
def test_it_ends_as_the_real_one(
    tmp_path: Path, how: str, meanwhile: Callable[[Path], None], status: int, cause: list
) -> None:
    statuses = [start(tmp_path / start.__name__, how, meanwhile) for start in (real, forked)]
    said = (tmp_path / "forked.log").read_text()
    assert statuses == [status, status], said
    assert report(tmp_path / "real") == report(tmp_path / "forked") == cause, said
    if how != "wait":  # torchrun has passed on what its ranks say, and kept it
        assert "[default1]:rank 1 says hello" in said
        (kept,) = (tmp_path / "forked/logs").rglob("1/stdout.log")
        assert kept.read_text() == "rank 1 says hello\n"
    theirs, ours = facts(tmp_path / "real"), facts(tmp_path / "forked")
    for a, b in zip(theirs, ours, strict=True):
        assert b["parent"] == int((tmp_path / "forked.pid").read_text()), "a rank is torchrun's child"
        assert b["leads_its_group"]
        changing = {"pid", "parent", "arguments"}
        assert {k: v for k, v in a.items() if k not in changing} == {
            k: v for k, v in b.items() if k not in changing
        }
    if meanwhile is kill:  # its ranks live on in both cases, as orphans
        for fact in (*theirs, *ours):
            rank = psutil.Process(fact["pid"])
            assert rank.ppid() != fact["parent"]
            rank.kill()
    else:
        wait_for(lambda: not any(lives(fact["pid"]) for fact in ours))


def test_a_job_whose_test_is_over_ends_and_answers_nobody(tmp_path: Path) -> None:
    """pytest's time limit raises within `ask`: the job would go on in a folder that its test has left."""

    def give_up(folder: Path) -> None:
        wait_for((folder / "rank.1.json").exists)
        raise TimeoutError

    with pytest.raises(TimeoutError):
        forked(tmp_path / "left", "wait", give_up)
    rank = json.loads((tmp_path / "left/rank.1.json").read_text())["pid"]
    wait_for(lambda: not lives(rank))  # killed before `ask` returned, and dead a moment later
    assert forked(tmp_path / "next", "fail", nothing) == 1
