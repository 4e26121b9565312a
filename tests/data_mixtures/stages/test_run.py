"""Units on processes of this machine: what is done, what is done again, and what becomes of workers that die."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from data_mixtures.stages import run as run_module
from data_mixtures.stages import stage
from data_mixtures.stages.run import Options
from data_mixtures.stages.stage import Unit
from records.files import hold_lock
from tests.data_mixtures.stages.toy_stage import Toy, run

ROOT = Path(__file__).resolve().parents[3]
WORKERS = pytest.mark.parametrize("workers", [1, 3])


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    (tmp_path / "faults").mkdir()
    return Toy(tmp_path / "out", tmp_path / "faults")


def results(toy: Toy) -> dict[str, bytes]:
    """Every file of the stage; what is not finished, and the logs, are not part of it."""
    folder = toy.out / toy.name
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def start(toy: Toy, workers: int = 2, wait_s: float = 0.3) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.data_mixtures.stages.toy_stage", str(toy.out), str(toy.faults)]
    command += [str(workers), str(wait_s)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition, what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.02)


def receipts(toy: Toy) -> int:
    return len(list((toy.out / toy.name).glob("*/unit-*/receipt.json")))


def workers_at_work(toy: Toy) -> list[int]:
    claims = (toy.out / ".logs" / toy.name / "workers").glob("*")
    return [int(claim.name) for claim in claims if claim.read_text()]


def test_results_are_the_same_and_nothing_is_done_twice(toy, tmp_path, capfd):
    other = Toy(tmp_path / "other", toy.faults)
    assert "6 units done" in run(toy, Options(workers=1))
    assert "6 units done" in run(other, Options(workers=3))
    assert results(toy) == results(other)
    assert len(results(toy)) == 18
    assert "0 units done, 6 as before" in run(other, Options(workers=3))
    (other.out / "toy/a/unit-00003/number").unlink()
    (other.out / "toy/b/unit-00004/receipt.json").write_text("{")
    assert "2 units done, 4 as before" in run(other, Options(workers=3))
    assert results(toy) == results(other)
    assert capfd.readouterr().err == ""  # what workers print is in a file


def test_receipts_and_summary(toy):
    with stage.exclusive(toy.out):
        found = run_module.run_units(toy, Options(), Console(quiet=True))
    assert [unit.number for unit in found] == list(range(6))
    assert found[Unit("a", 3)]["counts"] == {"documents": 3, "dropped": {"empty": 1, "too_long": 2}}
    console = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(run_module.summary("toy", found))
    rows = [line.split() for line in console.export_text().splitlines()]
    assert ["source", "units", "documents", "dropped"] in rows
    assert ["b", "3", "6", "9"] in rows
    assert ["a", "3", "9", "9"] in rows


@WORKERS
@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("value", ValueError, r"^toy b/unit-00004: the third row has no text$"),
        ("disk", ValueError, r"^toy b/unit-00004: \[Errno 28\] No space left on device$"),
        ("bug", (KeyError, RuntimeError), "nobody thought of this"),
    ],
)
def test_a_failing_unit_is_named_and_leaves_nothing(toy, workers, fault, error, message):
    (toy.faults / "4").write_text(fault)
    with pytest.raises(error, match=message):
        run(toy, Options(workers=workers))
    assert not list(toy.out.rglob("*.partial"))
    assert not (toy.out / "toy/b/unit-00004").exists()
    (toy.faults / "4").unlink()
    run(toy, Options(workers=workers))
    assert receipts(toy) == 6


def test_a_killed_worker_is_an_error_that_names_its_unit_not_a_hang(toy):
    (toy.faults / "3").write_text("kill")
    with pytest.raises(
        ValueError, match=r"worker at a/unit-00003 was killed \(exit status -9.*run the same command again"
    ):
        run(toy, Options(workers=2))
    assert "about to be killed" in (toy.out / ".logs/toy/workers.log").read_text()
    assert not list(toy.out.rglob("*.partial"))
    (toy.faults / "3").unlink()
    run(toy, Options(workers=2))
    assert receipts(toy) == 6


@pytest.mark.job
def test_the_end_of_the_main_process_is_the_end_of_all(toy):
    run(Toy(toy.out.with_name("undisturbed"), toy.faults, 12), Options())
    process = start(toy)
    wait_for(lambda: receipts(toy) >= 2 and workers_at_work(toy), "a unit after two that are finished")
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 3  # the server that forks, two workers
    process.kill()
    process.wait()
    wait_for(
        lambda: not any(psutil.pid_exists(each.pid) and each.status() != "zombie" for each in family),
        "the end",
    )
    assert 2 <= receipts(toy) < 12
    (toy.out / "toy/a/.unit-00001.killed.partial").mkdir(exist_ok=True)
    again = start(toy, wait_s=0)
    assert again.wait() == 0, again.stderr.read()
    assert results(toy) == results(Toy(toy.out.with_name("undisturbed"), toy.faults))


def test_ctrl_c_ends_all_and_leaves_nothing(toy):
    process = start(toy)
    wait_for(lambda: workers_at_work(toy), "work")
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert (
        process.stderr.read()
        == "stopped; run the same command again: it continues with the unfinished units\n"
    )
    wait_for(
        lambda: not any(psutil.pid_exists(each.pid) and each.status() != "zombie" for each in family),
        "the end",
    )
    assert not list(toy.out.rglob("*.partial"))


def test_one_preparation_of_a_folder_at_a_time(toy):
    held = rf"another process is preparing .* \(held by process {os.getpid()} on "
    with hold_lock(toy.out / ".lock", ""), pytest.raises(ValueError, match=held):
        run(toy, Options())
    run(toy, Options())


def test_a_file_system_without_locks_is_not_another_process(toy, monkeypatch):
    def flock(*arguments):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(
        ValueError, match=r"\.lock cannot be locked \(.*not implemented\); mount its file system with"
    ):
        run(toy, Options())


def test_freed_files_are_not_made_again_and_are_missed_by_name(toy):
    run(toy, Options())
    unit = Unit("a", 3)
    assert stage.free(toy.out, "toy", unit) == len("half") + len("3")
    assert [path.name for path in (toy.out / "toy/a/unit-00003").iterdir()] == ["receipt.json"]
    assert stage.is_done(toy, unit)
    assert "0 units done, 6 as before" in run(toy, Options())
    with pytest.raises(
        ValueError, match=r"unit-00003 was freed, and is needed again; remove it .*and run 'toy'"
    ):
        stage.result(toy.out, "toy", unit)
    assert stage.free(toy.out, "toy", unit) == 0
