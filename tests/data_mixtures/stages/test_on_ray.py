"""Tests of Ray on two local raylets: one is killed, a unit fails, a worker dies each time."""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path

import pytest
from rich.console import Console

from data_mixtures import prepare
from data_mixtures.stages.run import Options
from tests.data_mixtures.conftest import files_of
from tests.data_mixtures.stages.test_run import results, wait_for
from tests.data_mixtures.stages.toy_stage import Toy, run
from tests.data_mixtures.test_restarts import count_receipts, write_recipe

FILES = ("notes/shard-00001.bin", "sums/source.json", "notes/source.json", "phase1.lock.json")
RAY = Options(kind="ray", workers=0)


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    # pytest's folder is too long for the name of a Unix socket
    folder = tempfile.mkdtemp(prefix="ray")
    node = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    # given as temp_dir, Ray also writes to /tmp/ray, which not every machine has
    monkeypatch.setenv("RAY_TMPDIR", folder)
    ray_cluster = Cluster(initialize_head=True, head_node_args=dict(node))
    node.pop("include_dashboard")
    ray_cluster.add_node(**node)
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address)
    yield ray_cluster
    ray.shutdown()
    ray_cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def lose_a_node(cluster, when) -> threading.Thread:
    def lose() -> None:
        wait_for(when, "work")
        cluster.remove_node(list(cluster.worker_nodes)[0], allow_graceful=False)  # noqa: RUF015

    thread = threading.Thread(target=lose)
    thread.start()
    return thread


@pytest.mark.rotate
def test_a_lost_node_changes_no_byte(s3, cluster, recipe_path, tmp_path, monkeypatch):
    (tmp_path / "faults").mkdir()
    toy, local = (
        Toy(tmp_path / name, tmp_path / "faults", wait_s=0.5) for name in ("toy", "local")
    )
    (toy.faults / "4").write_text("value")
    with pytest.raises(ValueError, match=r"^toy b/unit-00004: the third row has no text$"):
        run(toy, RAY)
    # Ray starts a killed worker's unit again, RETRIES times
    (toy.faults / "4").write_text("kill")
    with pytest.raises(
        ValueError,
        match=r"toy b/unit-00004: its worker was lost 4 times: .*run the same command again",
    ):
        run(toy, RAY)
    (toy.faults / "4").unlink()
    run(toy, RAY)
    run(Toy(local.out, local.faults), Options())
    assert results(toy) == results(local)
    assert not list(toy.out.rglob("*.partial"))

    (tmp_path / "more").mkdir()
    recipe = write_recipe(tmp_path / "more")
    mirror = str(tmp_path / "more/mirror")
    quiet = Console(quiet=True)
    prepare.prepare(recipe, tmp_path / "one", Options(), quiet, mirror=mirror)
    killer = lose_a_node(
        cluster, lambda: len(list((tmp_path / "many/filter").glob("*/unit-*"))) > 2
    )
    prepare.prepare(recipe, tmp_path / "many", RAY, quiet, mirror=mirror)
    killer.join()
    assert not cluster.worker_nodes
    assert count_receipts(tmp_path / "many") > 50
    assert files_of(tmp_path / "many") == files_of(tmp_path / "one")

    # this process's copy of the bucket lies in tmp_path
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    recipe_path.write_text(
        recipe_path.read_text().replace("windows_per_shard = 40", "windows_per_shard = 400")
    )
    prepare.prepare(recipe_path, tmp_path / "disk", Options(), quiet)
    prepare.prepare(recipe_path, Path("s3://bucket/data"), RAY, quiet)
    on_disk = {name: (tmp_path / "disk" / name).read_bytes() for name in FILES}
    assert {name: s3.cat_file(f"bucket/data/{name}") for name in FILES} == on_disk
