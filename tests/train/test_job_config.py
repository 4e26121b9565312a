"""Every shipped job file: it parses, and its model builds on the meta device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from laneformer import LaneformerConfig
from tests.records.test_job import JOBS

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(JOBS)
# in a process of its own: TorchTitan is taught about CPUs before it is imported, and keeps global state
LOAD = """
import json, sys, torch
from train.job_config import patch_torch_for_cpu
patch_torch_for_cpu()
from torchtitan.config import ConfigManager
import train.spec
from torchtitan.protocols.train_spec import get_train_spec
facts = {}
for path in sys.argv[1:]:
    job = ConfigManager().parse_args(["--job.config_file", path])
    spec = get_train_spec(job.model.name)
    args = spec.model_args[job.model.flavor]
    args.update_from_config(job)
    with torch.device("meta"):
        model = spec.model_cls(args)
    facts[path] = {"parameters": args.get_nparams_and_flops(model, job.training.seq_len)[0]}
print(json.dumps(facts))
"""


def test_without_torchrun_a_missing_job_file_is_named() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "RANK"}
    done = subprocess.run(
        [sys.executable, "-m", "train"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert "--job.config_file is missing" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def facts() -> dict[str, dict]:
    command = [sys.executable, "-c", LOAD, *(str(p.relative_to(ROOT)) for p in CONFIGS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_config_builds_its_model(facts: dict[str, dict]) -> None:
    assert {"configs/phase1.toml", "configs/phase2.toml", "configs/debug_phase1.toml"} <= facts.keys()
    for path, fact in facts.items():
        flavor = tomllib.loads((ROOT / path).read_text())["model"]["flavor"]
        assert fact["parameters"] == LaneformerConfig.from_flavor(flavor).parameter_count()["total"], path


def test_phases_agree_where_they_must() -> None:
    one, two = (tomllib.loads((ROOT / f"configs/phase{n}.toml").read_text()) for n in (1, 2))
    for section, key in (("model", "flavor"), ("training", "seq_len"), ("training", "global_batch_size")):
        assert one[section][key] == two[section][key], key
    steps = one["training"]["steps"]
    assert two["checkpoint"]["initial_load_path"] == f"{one['job']['dump_folder']}/checkpoint/step-{steps}"
    assert one["checkpoint"]["allow_fresh_start"]
    assert not two["checkpoint"]["allow_fresh_start"]
    for job in (one, two):
        gpus = (
            job["parallelism"]["data_parallel_replicate_degree"]
            * job["parallelism"]["data_parallel_shard_degree"]
        )
        assert job["training"]["global_batch_size"] % (gpus * job["training"]["local_batch_size"]) == 0


def test_unknown_keys_are_refused(tmp_path: Path) -> None:
    text = (ROOT / "configs/debug_phase1.toml").read_text().replace("[mixture]", "[mixture]\nlok = 'x'")
    path = tmp_path / "typo.toml"
    path.write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert "lok" in done.stderr
