"""The watcher of Slurm's arrays when Slurm does not answer, on stand-ins for its programs;
tasks are real processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from data_mixtures.stages import slurm
from data_mixtures.stages.run import Options
from data_mixtures.stages.stage import Unit, key_of
from tests.data_mixtures.stages import fake_slurm
from tests.data_mixtures.stages.fake_slurm import commands, fail
from tests.data_mixtures.stages.toy_stage import Toy, run
from tests.tools.launch.slurm_cluster import wait_for

ROOT = Path(__file__).resolve().parents[3]
SLURM = Options(workers=2, kind="slurm", sbatch={"partition": "p", "exclusive": ""})


@pytest.fixture
def toy(tmp_path, monkeypatch) -> Toy:
    (tmp_path / "faults").mkdir()
    monkeypatch.setattr(slurm, "POLL_S", (0.1, 0.1))
    monkeypatch.setattr(slurm, "SETTLE_S", 0.5)
    return Toy(tmp_path / "out", tmp_path / "faults", count=4)


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Path:
    folder = fake_slurm.install(tmp_path / "bin", max_array_size=3)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def units_of_tasks(toy: Toy) -> list[str]:
    """What the tasks began, from their logs."""
    return sorted(
        line for log in (toy.out / ".logs/toy").glob("*/*.log") for line in log.read_text().splitlines()
    )


def test_time_outs_are_asked_again_and_nothing_is_cancelled_or_submitted_twice(toy, cluster):
    fail(cluster, "sbatch", 1)  # it says that it timed out, and the controller has the job
    fail(cluster, "squeue", 3)
    printed = run(toy, SLURM)
    assert (
        printed.count("squeue: squeue: error: Socket timed out on send/recv operation; asking again in") == 3
    )
    assert "4 units done" in printed
    assert len(commands(cluster, "sbatch")) == 1
    assert not commands(cluster, "scancel")
    [submitted] = commands(cluster, "sbatch")
    assert "--array=0-2%2" in submitted  # four units in what MaxArraySize = 3 allows, two tasks at a time
    assert "--exclusive --job-name" in submitted
    assert len(units_of_tasks(toy)) == 4


@pytest.mark.slow
def test_a_controller_that_stays_away_is_an_error_and_jobs_go_on(toy, cluster, monkeypatch):
    (cluster / "held").touch()
    kill_a_watcher(toy, cluster)
    fail(cluster, "squeue", 1000)
    with monkeypatch.context() as patch:
        patch.setattr(slurm, "RETRY_S", 0.5)
        with pytest.raises(ValueError, match=r"toy: for 0 s Slurm has not answered: squeue: .*timed out"):
            run(toy, SLURM)
    fail(cluster, "squeue", 0)
    with pytest.raises(
        ValueError, match=r"toy: Slurm still has 3 tasks of it; wait for them with .* scancel 1$"
    ):
        run(toy, Options())
    (cluster / "held").unlink()
    printed = run(toy, SLURM)
    assert "waits for 3 tasks of an earlier start, jobs 1" in printed
    assert "4 units done" in printed
    assert len(commands(cluster, "sbatch")) == 1
    assert not commands(cluster, "scancel")
    assert "4 as before" in run(toy, Options())


def start(toy: Toy, cluster: Path) -> subprocess.Popen:
    """A watcher in a process of its own that has submitted and looks at the queue."""
    module = "tests.data_mixtures.stages.toy_stage"
    command = [sys.executable, "-m", module, str(toy.out), str(toy.faults), "slurm", "0", "4"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(commands(cluster, "squeue")) > 2, "a submission", 30)
    return process


def kill_a_watcher(toy: Toy, cluster: Path) -> None:
    process = start(toy, cluster)
    process.kill()
    process.wait()


@pytest.mark.slow
def test_ctrl_c_leaves_the_jobs_and_says_how_to_end_them(toy, cluster):
    (cluster / "held").touch()
    process = start(toy, cluster)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    said = "stopped; 3 tasks go on; the same command waits for them, scancel 1 ends them\n"
    assert process.stderr.read() == said
    assert not commands(cluster, "scancel")
    (cluster / "held").unlink()


class Changed(Toy):
    """Another recipe: other results for the units 1 and 3."""

    def key(self, unit: Unit) -> str:
        return key_of("fetch", unit.number, *("changed",) * (unit.number % 2))


@pytest.mark.slow
def test_queued_tasks_of_another_recipe_are_named_and_nothing_runs_beside_them(toy, cluster):
    (cluster / "held").touch()
    kill_a_watcher(toy, cluster)
    changed = Changed(toy.out, toy.faults, count=4)
    for options in (SLURM, Options()):
        with pytest.raises(
            ValueError, match=r"toy: 3 tasks are queued from before recipe.*; scancel 1, and start again"
        ):
            run(changed, options)
    fake_slurm.main(cluster, "scancel", "1_0", "1_1", "1_2")
    (cluster / "held").unlink()
    assert "4 units done" in run(changed, SLURM)


@pytest.mark.slow
def test_what_is_free_is_used_beside_adopted_tasks(toy, cluster):
    (cluster / "held").touch()
    kill_a_watcher(toy, cluster)
    fake_slurm.main(cluster, "scancel", "1_0", "1_1")  # the three tasks have the units 0 and 3, 1, 2
    threading.Timer(1.0, (cluster / "held").unlink).start()
    printed = run(toy, SLURM)
    assert "waits for 1 tasks of an earlier start, jobs 1" in printed
    assert "--array=0-2%1" in commands(cluster, "sbatch")[1]  # two tasks at a time in all
    assert "4 units done" in printed


def test_a_unit_that_fails_is_tried_again_while_others_go_on(toy, cluster):
    (toy.faults / "0").write_text("disk")
    with pytest.raises(ValueError, match=r"^toy b/unit-00000: .*No space left on device; \d tasks go on"):
        run(toy, SLURM)
    (toy.faults / "0").unlink()
    assert "units done" in run(toy, SLURM)
    assert not commands(cluster, "scancel")


def test_without_slurm(toy, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="scontrol is not installed here; start this where Slurm is"):
        run(toy, SLURM)
