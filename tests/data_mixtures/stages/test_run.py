"""Tests of units on local processes: what is done, what is repeated, and workers that die."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from data_mixtures.stages.run import Options
from records.files import hold_lock
from tests.data_mixtures.stages.toy_stage import Toy, run

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def toy(tmp_path):
    (tmp_path / "faults").mkdir()
    return Toy(tmp_path / "out", tmp_path / "faults")


def results(toy: Toy) -> dict[str, bytes]:
    folder = toy.out / toy.name
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def start(toy: Toy) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "tests.data_mixtures.stages.toy_stage",
        str(toy.out),
        str(toy.faults),
    ]
    return subprocess.Popen([*command, "2"], cwd=ROOT, stderr=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], object], what: str) -> None:
    # a limit that only a hang reaches, on however slow a machine
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.02)


def count_receipts(toy: Toy) -> int:
    return len(list((toy.out / toy.name).glob("*/unit-*/receipt.json")))


def family_at_work(toy: Toy, process: subprocess.Popen, at_units: set[str]) -> list[psutil.Process]:
    """Wait until workers are at these units; return the stage's processes."""

    def read_claims() -> set[str]:
        return {claim.read_text() for claim in (toy.out / ".logs" / toy.name / "workers").glob("*")}

    wait_for(lambda: at_units <= read_claims(), f"work at {at_units}")
    family = psutil.Process(process.pid).children(recursive=True)
    # the fork server and two workers
    assert len(family) >= 3
    return family


def wait_for_end(family: list[psutil.Process]) -> None:
    def has_ended(process: psutil.Process) -> bool:
        try:
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    wait_for(lambda: all(map(has_ended, family)), "the end of all processes")


def test_results_are_the_same_and_nothing_is_done_twice(toy, tmp_path, capfd):
    other = Toy(tmp_path / "other", toy.faults)
    assert "6 units done" in run(toy, Options(workers=1))
    assert "6 units done" in run(other, Options(workers=3))
    assert results(toy) == results(other)
    assert len(results(toy)) == 18
    assert "0 units done, 6 as before" in run(other, Options(workers=3))
    # one unit lost a file, another has half a receipt: both count as not done
    (other.out / "toy/a/unit-00003/number").unlink()
    (other.out / "toy/b/unit-00004/receipt.json").write_text("{")
    assert "2 units done, 4 as before" in run(other, Options(workers=3))
    assert results(toy) == results(other)
    # what workers print goes to workers.log, not to the terminal
    assert capfd.readouterr().err == ""


KILLED = r"worker at b/unit-00004 was killed \(exit status -9.*run the same command again"


@pytest.mark.parametrize(
    ("workers", "fault", "error", "message"),
    [
        (1, "disk", ValueError, r"^toy b/unit-00004: \[Errno 28\] No space left on device$"),
        (2, "bug", RuntimeError, "nobody thought of this"),
        (2, "kill", ValueError, KILLED),
    ],
)
def test_a_failing_unit_is_named_and_leaves_nothing(toy, workers, fault, error, message):
    (toy.faults / "4").write_text(fault)
    with pytest.raises(error, match=message):
        run(toy, Options(workers=workers))
    # a killed worker is an error, not a hang
    if fault == "kill":
        assert "about to be killed" in (toy.out / ".logs/toy/workers.log").read_text()
    assert not list(toy.out.rglob("*.partial"))
    assert not (toy.out / "toy/b/unit-00004").exists()
    (toy.faults / "4").unlink()
    run(toy, Options(workers=workers))
    assert count_receipts(toy) == 6


def test_ctrl_c_ends_all_and_leaves_nothing(toy):
    for number in (0, 1):
        (toy.faults / str(number)).write_text("wait")
    process = start(toy)
    family = family_at_work(toy, process, {"b/unit-00000", "a/unit-00001"})
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    stopped = "toy: stopped; run the same command again: it continues with the unfinished units\n"
    assert process.stderr.read() == stopped
    wait_for_end(family)
    assert not list(toy.out.rglob("*.partial"))


def test_one_preparation_of_a_folder_at_a_time(toy, monkeypatch):
    message = rf"another process is preparing .* \(held by process {os.getpid()} on "
    with hold_lock(toy.out / ".lock", ""), pytest.raises(ValueError, match=message):
        run(toy, Options())

    def flock(*arguments):
        raise OSError(errno.ENOSYS, "Function not implemented")

    # a file system without locks must not be taken for another process
    monkeypatch.setattr(fcntl, "flock", flock)
    without = r"\.lock cannot be locked \(.*not implemented\); mount its file system with"
    with pytest.raises(ValueError, match=without):
        run(toy, Options())
