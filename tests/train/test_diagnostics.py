"""Test that the stream diagnostics of a logged step cost no compilation."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchtitan.config import JobConfig

from laneformer import LaneformerConfig
from laneformer.titan.parallelize import apply_fsdp, wrap_and_compile_layers
from laneformer.titan.spec import LaneformerArgs, TitanLaneformer
from train.diagnostics import Diagnostics

SHAPES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "sliding_window": 8,
    "swa_layers": (),
    "vocab_size": 64,
}
# in both a layer of every kind: the first ones receive nothing, the last ones broadcast nothing
FEW, MANY = 8, 12


@pytest.fixture
def one_rank(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def count_graphs(layers: int, mesh: DeviceMesh) -> int:
    # of two logged steps and one that is not
    torch._dynamo.reset()
    counters.clear()
    model = TitanLaneformer(
        LaneformerArgs(
            config=LaneformerConfig.from_flavor("tiny", num_hidden_layers=layers, **SHAPES)
        )
    )
    model.init_weights()
    job = JobConfig()
    job.compile.enable, job.compile.backend, job.activation_checkpoint.mode = True, "eager", "none"
    wrap_and_compile_layers(model, job)
    apply_fsdp(model, mesh, job)
    diagnostics = Diagnostics(model)
    tokens = torch.randint(3, 64, (1, 9))
    for logged in (True, False, True):
        if logged:
            diagnostics.begin()
        model(tokens[:, :-1], tokens[:, 1:]).sum().backward()
        if logged:
            diagnostics.end_micro_batch(tokens[:, 1:])
            assert len(diagnostics.mean_squares) == layers
    return counters["stats"]["unique_graphs"]


@pytest.mark.job
def test_watched_streams_compile_nothing_for_each_layer(one_rank):
    graphs = count_graphs(FEW, one_rank)
    # layers are compiled
    assert graphs > 1
    assert count_graphs(MANY, one_rank) == graphs
