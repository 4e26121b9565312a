"""Every shipped job file: it parses, and its model builds on the meta device."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from data_mixtures import recipe_file
from laneformer import LaneformerConfig
from records.events import REFUSED
from tests.records.test_job import JOBS
from tests.train import load_jobs
from tests.train.runs import forked

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(JOBS)


def test_without_torchrun_a_missing_job_file_is_named(tmp_path: Path) -> None:
    status, said = forked(tmp_path, "train")
    assert status == REFUSED
    assert "--job.config_file is missing" in said
    assert "Traceback" not in said


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    return load_jobs.answers([str(p.relative_to(ROOT)) for p in CONFIGS], tmp_path_factory.mktemp("facts"))


def test_every_config_builds_its_model(facts: dict[str, dict]) -> None:
    assert {"configs/phase1.toml", "configs/phase2.toml", "configs/debug_phase1.toml"} <= facts.keys()
    for path, fact in facts.items():
        job = tomllib.loads((ROOT / path).read_text())
        config = LaneformerConfig.from_flavor(job["model"]["flavor"], **job.get("architecture", {}))
        assert fact["parameters"] == config.parameter_count()["total"], path


def test_phases_agree_where_they_must() -> None:
    one, two, three = (tomllib.loads((ROOT / f"configs/phase{n}.toml").read_text()) for n in (1, 2, 3))
    for section, key in (("model", "flavor"), ("training", "seq_len"), ("training", "global_batch_size")):
        assert one[section][key] == two[section][key], key
    assert one["checkpoint"]["allow_fresh_start"]
    for before, after in ((one, two), (two, three)):
        last = f"{before['job']['dump_folder']}/checkpoint/step-{before['training']['steps']}"
        assert after["checkpoint"]["initial_load_path"] == last
        assert not after["checkpoint"]["allow_fresh_start"]
    assert three["model"]["flavor"] == two["model"]["flavor"]
    assert set(three["architecture"]) == set(three["checkpoint"]["allow_changes"])
    of_two = recipe_file.load(ROOT / "data_mixtures/nemotron.toml").phases["phase2"]
    of_three = recipe_file.load(ROOT / "data_mixtures/nemotron-64k.toml").phases["phase3"]
    again = {name for name, weight in of_two.items() if weight} & set(of_three)
    assert set(three["mixture"]["begin_again"]) == again, "other windows of sources that phase 2 has read"
    for job in (one, two, three):
        gpus = (
            job["parallelism"]["data_parallel_replicate_degree"]
            * job["parallelism"]["data_parallel_shard_degree"]
        )
        assert job["training"]["global_batch_size"] % (gpus * job["training"]["local_batch_size"]) == 0
