"""A stage on a real Slurm of three virtual nodes: failing, killed, finished, and cleared away after a killed start."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from data_mixtures.stages import run as run_module
from tests.data_mixtures.stages.toy_stage import SLURM, Toy, run
from tests.tools.launch.slurm_cluster import SlurmCluster, missing, wait_for

pytestmark = pytest.mark.skipif(
    bool(missing()), reason=f"no {', '.join(missing())} here: `make slurm` installs a Slurm"
)
ROOT = Path(__file__).resolve().parents[3]


def test_a_stage_on_slurm(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "QUEUE_POLL_S", 0.3)
    (tmp_path / "cluster").mkdir()
    (tmp_path / "faults").mkdir()
    toy = Toy(tmp_path / "out", tmp_path / "faults", count=4)
    resource_tracker.ensure_running()  # before the environment says Slurm: the cluster ends whatever belongs to it
    with SlurmCluster(tmp_path / "cluster") as cluster:
        for name in ("SLURM_CONF", "PATH"):
            monkeypatch.setenv(name, cluster.env[name])
        (toy.faults / "1").write_text("value")
        with pytest.raises(ValueError, match=r"^toy a/unit-00001: the third row has no text$"):
            run(toy, SLURM)
        (toy.faults / "1").write_text("kill")
        with pytest.raises(
            ValueError, match=r"no job left, but 1 of \d units are not finished \(begun: a/unit-00001\)"
        ):
            run(toy, SLURM)
        (toy.faults / "1").unlink()
        nowhere = replace(SLURM, sbatch={**SLURM.sbatch, "partition": "nowhere"})
        with pytest.raises(ValueError, match=r"toy: sbatch ended with status 1: .*nvalid partition"):
            run(toy, nowhere)
        command = [sys.executable, "-m", "tests.data_mixtures.stages.toy_stage", toy.out, toy.faults, "slurm", "600"]
        left = subprocess.Popen([str(part) for part in command], cwd=ROOT)
        wait_for(lambda: "R" in cluster.command("squeue", "--noheader", "--format", "%t"), "a task", 60)
        left.kill()
        left.wait()
        assert cluster.command("squeue", "--noheader")  # the tasks of a killed start go on
        assert "1 units done, 3 as before" in run(toy, SLURM)
        assert not cluster.command("squeue", "--noheader")
    assert not list(toy.out.rglob("*.partial"))
