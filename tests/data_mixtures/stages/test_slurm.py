"""A stage on a real Slurm of three virtual nodes: failing, killed, finished; a killed
watcher, a lost controller.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from data_mixtures.stages import slurm
from tests.data_mixtures.stages.toy_stage import SLURM, Toy, run
from tests.tools.launch.slurm_cluster import SlurmCluster, missing, wait_for

pytestmark = pytest.mark.skipif(
    bool(missing()), reason=f"no {', '.join(missing())} here: `make packages` installs a Slurm"
)
ROOT = Path(__file__).resolve().parents[3]


def receipts(toy: Toy) -> dict[str, int]:
    return {
        path.parent.name: path.stat().st_mtime_ns
        for path in (toy.out / toy.name).glob("*/unit-*/receipt.json")
    }


@pytest.mark.slow
def test_a_stage_on_slurm(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "POLL_S", (0.3, 0.3))
    monkeypatch.setattr(slurm, "SETTLE_S", 1.0)
    monkeypatch.setattr(slurm, "RETRY_S", 60.0)
    (tmp_path / "cluster").mkdir()
    (tmp_path / "faults").mkdir()
    toy = Toy(tmp_path / "out", tmp_path / "faults", count=4)
    resource_tracker.ensure_running()  # before the environment says Slurm: the cluster ends whatever belongs to it
    with SlurmCluster(tmp_path / "cluster") as cluster:
        for name in ("SLURM_CONF", "PATH"):
            monkeypatch.setenv(name, cluster.env[name])
        (toy.faults / "1").write_text("value")
        with pytest.raises(ValueError, match=r"^toy a/unit-00001: the third row has no text"):
            run(toy, SLURM)
        (toy.faults / "1").write_text("kill")
        with pytest.raises(
            ValueError, match=r"1 units are not finished.*at\n  a/unit-00001: .*Killed.* \(.*/0.log\)"
        ):
            run(toy, SLURM)
        (toy.faults / "1").unlink()
        nowhere = replace(SLURM, sbatch={**SLURM.sbatch, "partition": "nowhere"})
        with pytest.raises(ValueError, match=r"toy: sbatch ended with status 1: .*nvalid partition"):
            run(toy, nowhere)
        assert "1 units done, 3 as before" in run(toy, SLURM)
        adopted_after_a_killed_watcher(toy, cluster)
    assert not list(toy.out.rglob("*.partial"))


def restart_controller(cluster: SlurmCluster, pause_s: float) -> None:
    controller = cluster.daemons.pop("slurmctld")
    controller.terminate()  # it saves its queue then; what was submitted just before a SIGKILL, Slurm itself may forget
    controller.wait()
    time.sleep(pause_s)
    cluster._start("slurmctld", "slurmctld", "-D")  # without -c: with the queue that it had
    cluster.daemons["slurmctld"].wait()  # it would die with the thread that started it


def adopted_after_a_killed_watcher(toy: Toy, cluster: SlurmCluster) -> None:
    """12 units, 4 of them done, in 8 tasks, three at a time."""
    command = [
        sys.executable,
        "-m",
        "tests.data_mixtures.stages.toy_stage",
        toy.out,
        toy.faults,
        "slurm",
        "2",
    ]
    left = subprocess.Popen([str(part) for part in command], cwd=ROOT)
    wait_for(
        lambda: cluster.command("squeue", "--noheader", "--array", "--format", "%t").count("R") == 3,
        "tasks",
        60,
    )
    left.kill()
    left.wait()
    before = receipts(toy)
    assert len(before) < 12
    with pytest.raises(ValueError, match=r"toy: Slurm still has \d tasks of it; wait for them"):
        run(replace(toy, count=12), replace(SLURM, kind="local"))
    threading.Thread(target=restart_controller, args=(cluster, 4), daemon=True).start()
    printed = run(replace(toy, count=12), SLURM)
    assert re.search("squeue.*; asking again in", printed)
    assert re.search(r"waits for \d+ tasks of an earlier start", printed), printed
    assert "Submitted" not in printed
    assert "12 as before" in run(replace(toy, count=12), SLURM)
    assert len(receipts(toy)) == 12
    assert before.items() <= receipts(toy).items()  # nothing was done again
