"""Test of the shipped Ray script on a real Slurm: both nodes work, bytes as of one process."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.data_mixtures.conftest import files_of, prepare_folder
from tests.tools.launch.slurm_cluster import SlurmCluster, missing, wait_for

pytestmark = pytest.mark.skipif(
    bool(missing()), reason=f"no {', '.join(missing())} here: `make packages` installs a Slurm"
)
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.rotate
def test_the_script_prepares_on_all_nodes_of_a_job(recipe_path, tmp_path):
    pytest.importorskip("ray")
    prepare_folder(recipe_path, tmp_path / "one")
    (tmp_path / "cluster").mkdir()
    log = tmp_path / "log"
    out = tmp_path / "out"
    with SlurmCluster(tmp_path / "cluster") as cluster:
        cluster.env["BIN"] = str(Path(sys.executable).parent)
        script = ["data_mixtures/ray.sbatch", "prepare", str(recipe_path), "--out", str(out)]
        # the script as it is shipped, on a Slurm of two nodes on this machine
        submitted = ["sbatch", "--parsable", "--nodes=2", f"--output={log}", *script]
        job = int(cluster.command(*submitted, cwd=ROOT))
        nodes = set[str]()

        def has_ended() -> bool:
            for node in {"n1", "n2"} - nodes:
                # a process may end while it is asked for its name
                with suppress(psutil.NoSuchProcess):
                    if any(
                        process.name().startswith("ray::") for process in cluster.processes(node)
                    ):
                        nodes.add(node)
            return cluster.job(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING")

        wait_for(has_ended, "the end of the job", 240)
        assert cluster.job(job)["JobState"] == "COMPLETED", log.read_text()
    assert re.search(r"Ray at localhost:\d+ has 2 of 2 nodes", log.read_text())
    assert nodes == {"n1", "n2"}, "workers of Ray on both"
    assert files_of(out) == files_of(tmp_path / "one")
