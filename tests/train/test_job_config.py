"""Tests that every shipped job file parses and its model builds on the meta device."""

from __future__ import annotations

import copy
import tomllib

import pytest
import torch

from data_mixtures import recipe_file
from laneformer import LaneformerConfig
from records.events import REFUSED
from tests.records.test_job import JOBS
from tests.train.runs import ROOT, run_forked
from train.job_config import load_job


@pytest.mark.job
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "--job.config_file is missing"),
        (
            ("--job.config_file", "configs/debug_phase1.toml"),
            "start it with `torchrun --nproc_per_node=N -m train",
        ),
    ],
)
def test_what_is_missing_without_torchrun_is_named(tmp_path, flags, says):
    status, output = run_forked(tmp_path, "train", *flags)
    assert status == REFUSED
    assert says in output
    assert "Traceback" not in output


def test_every_config_builds_its_model():
    # But for the jobs that delay a dense model: they need its folder
    # (tests/tools/test_delay_a_model.py).
    from train.spec import SPEC, register

    assert {path.name for path in JOBS} >= {"phase1.toml", "phase2.toml", "debug_phase1.toml"}
    for path in sorted(path for path in JOBS if not path.name.startswith("delay_")):
        try:
            job = load_job(["--job.config_file", str(path)])
        finally:
            # in place of that of an experiment
            register(SPEC)
        arguments = copy.copy(SPEC.model_args[job.model.flavor])
        arguments.update_from_config(job)
        with torch.device("meta"):
            model = SPEC.model_cls(arguments)
        shipped = tomllib.loads(path.read_text())
        config = LaneformerConfig.from_flavor(
            shipped["model"]["flavor"], **shipped.get("architecture", {})
        )
        parameters, _ = arguments.get_nparams_and_flops(model, job.training.seq_len)
        assert parameters == config.parameter_count()["total"], path


def test_phases_agree_where_they_must():
    one, two, three = (
        tomllib.loads((ROOT / f"configs/phase{n}.toml").read_text()) for n in (1, 2, 3)
    )
    for section, key in (
        ("model", "flavor"),
        ("training", "seq_len"),
        ("training", "global_batch_size"),
    ):
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
    # other windows of sources that phase 2 has read
    assert set(three["mixture"]["begin_again"]) == again
    for job in (one, two, three):
        gpus = (
            job["parallelism"]["data_parallel_replicate_degree"]
            * job["parallelism"]["data_parallel_shard_degree"]
        )
        assert (
            job["training"]["global_batch_size"] % (gpus * job["training"]["local_batch_size"]) == 0
        )
