"""Tests that lanes on 2 and 4 gloo ranks give one process' losses and gradients, with planted faults."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.config import JobConfig
from torchtitan.tools.utils import set_default_dtype

from laneformer.joins import MODULES, Join
from laneformer.titan.lane_axis import check_lane_axis, localize_before_forward, shard_lanes
from laneformer.titan.layer import TitanLayer
from laneformer.titan.parallelize import refuse_other_layers, wrap_and_compile_layers
from tests.laneformer.titan.lane_ranks import CASES, RUNS, build, config, measure, tokens
from tests.laneformer.titan.titan_assets import Watch, largest_difference

ROOT = Path(__file__).resolve().parents[3]
# of a tensor's largest value. Seen: 1.0e-14; 6.5e-6, which one rank in float32 has as well (6.7e-6)
BOUNDS = {"float64": 1e-12, "float32": 2e-5}
LARGE = 1e-3  # what a fault changes


@pytest.fixture(scope="module")
def alone():
    with set_default_dtype(torch.float64):
        models = {name: build(name) for name in CASES}
        for model in models.values():
            model.init_weights()
        return {name: flatten(measure(model)) for name, model in models.items()}


def flatten(results: dict[str, Any]) -> dict[str, torch.Tensor]:
    logsumexps, max_logits = results["logit_stats"]
    tensors = {"losses": results["losses"], "logsumexps": logsumexps, "max_logits": max_logits}
    return tensors | results["gradients"]


@pytest.mark.job
def test_every_mesh_is_one_process(alone, tmp_path):
    # a fault planted in the exchange is detected
    command = [sys.executable, "-m", "tests.laneformer.titan.lane_ranks", str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert child.returncode == 0, child.stderr[-3000:]
    for run in RUNS:
        actual, expected = flatten(torch.load(tmp_path / run.file)), dict(alone[run.case])
        for name in ("logsumexps", "max_logits"):  # rank 0 has those of its part of the batch
            expected[name] = expected[name][: len(actual[name])]
        difference = largest_difference(actual, expected)
        if run.fault:
            assert difference > LARGE, run
        else:
            assert difference < BOUNDS[run.dtype], run


def test_layers_with_an_exchange_of_their_own_are_refused():
    class OwnLayer(TitanLayer):
        pass

    model = build("delay-2")
    refuse_other_layers(model)
    model.layers[1] = OwnLayer(model.config, 1)
    with pytest.raises(ValueError, match="not possible with OwnLayer"):
        refuse_other_layers(model)


def under_way(operation, out) -> int:
    """Return the change in the number of all-reduces in flight."""
    return ("_c10d_functional.all_reduce" in str(operation)) - ("wait_tensor" in str(operation))


@pytest.mark.parametrize(("case", "late"), [("present", 0), ("delay-1", 1), ("local-start", 2)])
def test_late_sums_travel_while_layers_compute(tmp_path, case, late):
    # The sums of `late` layers are in flight at once, forward and backward. Each is requested once
    # per direction, although the backward pass recomputes the layers.
    store, job = torch.distributed.FileStore(str(tmp_path / "store"), 1), JobConfig()
    job.activation_checkpoint.mode = "full"
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        model = build(case)
        model.init_weights()
        shard_lanes(model, init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)))
        wrap_and_compile_layers(model, job)
        localize_before_forward(model.tok_embeddings, *model.layers, model.norm, model.lm_head)
        with Watch(under_way) as forward:
            losses = model(tokens()[:, :-1], tokens()[:, 1:])
        with Watch(under_way) as backward:
            losses.sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    joins = [model.config.join(i, module) for i in range(5) for module in MODULES]
    sums = joins.count(Join.PRESENT) + sum(
        model.config.adds_delayed(i, module) for i in range(5) for module in MODULES
    )
    for changes, started in (
        (forward.values, sums + 2),
        (backward.values, sums),
    ):  # the loss has two
        assert changes.count(1) == changes.count(-1) == started, "all have arrived"
        assert max(accumulate(changes)) == 2 * late + 1, "a layer sends before it waits"


@pytest.mark.parametrize(
    ("change", "job_change", "message"),
    [
        (
            {},
            {"parallelism.tensor_parallel_degree": 3},
            "does not divide num_lanes = 8; choose from 1, 2, 4, 8",
        ),
        ({"lm_head_type": "lane"}, {}, "lm_head_type = 'lane'"),
        ({"num_nextn_predict_layers": 1}, {}, "num_nextn_predict_layers = 1"),
        ({}, {"model.join_norm": "triton"}, "set join_norm = 'plain'"),
        ({}, {"model.converters": ["quantize.linear.float8"]}, "model.converters"),
    ],
)
def test_what_cannot_be_on_several_ranks_is_named(change, job_change, message):
    job = JobConfig()
    job.model = SimpleNamespace(join_norm="auto", converters=[])
    job.parallelism.tensor_parallel_degree = 2
    for name, value in job_change.items():
        section, field = name.split(".")
        setattr(getattr(job, section), field, value)
    with pytest.raises(ValueError, match=message):
        check_lane_axis(config("delay-2", **change), job)
    # all of it is possible on one rank
    job.parallelism.tensor_parallel_degree = 1
    check_lane_axis(config("delay-2", **change), job)
