"""Losses and gradients of small models whose lanes are on several ranks, each a process.

    python -m tests.laneformer.titan.lane_ranks FOLDER

Four gloo ranks, started once, compute one batch for each of RUNS. FOLDER/RUN.pt holds losses (B, S),
the head's `logit_stats`, and the whole gradient of each parameter.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from train.job_config import patch_torch_for_cpu

patch_torch_for_cpu()  # before TorchTitan is imported

import torch  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Replicate  # noqa: E402
from torchtitan.config import JobConfig  # noqa: E402

from laneformer import LaneformerConfig  # noqa: E402
from laneformer.titan import lane_axis, parallelize  # noqa: E402
from laneformer.titan.spec import LaneformerArgs, TitanLaneformer  # noqa: E402
from tests.laneformer.titan.titan_assets import gradients_of  # noqa: E402

SHAPES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 16,
    "head_dim": 2,
    "num_key_value_heads": 8,
    "num_lanes": 8,
    "sliding_window": 5,
    "swa_layers": (0, 1),
    "vocab_size": 64,
    "max_position_embeddings": 16,
    "broadcast_delay": 2,
    "initializer_range": 0.3,
}
CASES: dict[str, dict[str, Any]] = {
    "present": {"broadcast_delay": 0},
    "delay-1": {"broadcast_delay": 1},
    "delay-2": {},
    "local-start": {"use_early_comm": False},
    "sent-again": {"rebroadcast_early": True},
    "late": {"first_late_layer": 3},
    "attention-only": {"use_mlp_comm": False},
    "flush": {"flush": True},  # the one whose streams are equal once they are flushed: `first_only`
    "flush-1": {"flush": True, "broadcast_delay": 1, "use_early_comm": False},
    "lane-scales": {"replicated_rmsn_scale": False},
    "full": {},
    "selective": {},
}
BATCH, LENGTH = 2, 12


def config(name, **change) -> LaneformerConfig:
    return LaneformerConfig.from_flavor("tiny", **{**SHAPES, **CASES[name], **change})


def tokens() -> torch.Tensor:
    return torch.randint(
        3, SHAPES["vocab_size"], (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(7)
    )


def build(name) -> TitanLaneformer:
    model = TitanLaneformer(LaneformerArgs(config=config(name)))
    model.lm_head.chunk_tokens, model.lm_head.z_loss_weight = 5, 0.1
    return model


def measure(model, part=0, parts=1) -> dict[str, Any]:
    """Return losses, logit_stats and gradients of one of `parts` equal parts of the batch."""
    batch, weights = tokens(), torch.linspace(0.5, 1.5, BATCH * LENGTH).view(BATCH, LENGTH)
    labels = batch[:, 1:].clone()
    # ignored labels
    labels[0, :3] = -100
    inputs, labels, weights = (
        tensor.chunk(parts)[part] for tensor in (batch[:, :-1], labels, weights)
    )
    losses = model(inputs, labels)
    # unequal weights, so that exchanged tokens change the gradients
    (losses * weights).sum().backward()
    gradients = gradients_of(model)
    whole = {
        name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in gradients.items()
    }
    return {"losses": losses.detach(), "logit_stats": model.lm_head.logit_stats, "gradients": whole}


def one_case(name, dtype, mesh) -> dict[str, Any]:
    job = JobConfig()
    job.training.mixed_precision_param = job.training.mixed_precision_reduce = dtype
    job.activation_checkpoint.mode = name if name in ("full", "selective") else "none"
    job.activation_checkpoint.selective_ac_option = "op"
    # built without memory, split over ranks, then allocated and initialized, as a job does
    with torch.device("meta"):
        model = build(name)
    lane_axis.shard_lanes(model, mesh["tp"])
    parallelize.wrap_and_compile_layers(model, job)
    lane_axis.localize_before_forward(
        model.tok_embeddings, *model.layers, model.norm, model.lm_head
    )
    parallelize.apply_fsdp(model, mesh["fsdp"], job)
    model.to_empty(device="cpu")
    model.init_weights()
    return measure(model, mesh.get_local_rank("fsdp"), mesh.size(0))


def own_twice(self: lane_axis.LaneAxis, in_flight, first_only=False) -> torch.Tensor:
    """Receive a sum that includes the lane's own partial output, which it has already added."""
    return lane_axis._Arrive.apply(in_flight[1], self.group)


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "own_twice": (lane_axis.LaneAxis, "receive", own_twice),
    "no_sum": (
        lane_axis,
        "Partial",
        Replicate,
    ),  # a gradient of what all ranks have is taken for the whole
    "part_of_vocabulary": (lane_axis.LaneAxis, "combine_softmax", lambda self, *parts: parts),
}


class Run(NamedTuple):
    """A case on RANKS ranks: `shards` groups split the batch, and each group splits the lanes."""

    shards: int
    case: str
    dtype: str = "float64"
    fault: str = ""

    @property
    def file(self) -> str:
        return "-".join(map(str, self)) + ".pt"


SHARED_BATCH = ("delay-2", "flush-1", "lane-scales", "selective")
RUNS = [
    *(Run(1 + (case in SHARED_BATCH), case) for case in CASES),
    Run(1, "delay-2", "float32"),
    *(Run(2, "delay-2", fault=fault) for fault in FAULTS),
]
RANKS = 4


def rank_main(rank, folder):
    store = torch.distributed.FileStore(str(folder / "store"), RANKS)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=RANKS, store=store)
    parallelize.TORCH_DTYPE_MAP["float64"] = torch.float64
    sizes = {shards: (shards, RANKS // shards) for shards in (1, 2)}
    meshes = {
        n: init_device_mesh("cpu", size, mesh_dim_names=("fsdp", "tp")) for n, size in sizes.items()
    }
    for run in RUNS:
        mesh = meshes[run.shards]
        torch.set_default_dtype(getattr(torch, run.dtype))
        with patch.object(*FAULTS[run.fault]) if run.fault else nullcontext():
            measured = one_case(run.case, run.dtype, mesh)
        everyone: list[Any] = [None] * RANKS
        torch.distributed.all_gather_object(everyone, measured["losses"])
        # ranks of one group have the same losses; take the first rank of each
        measured["losses"] = torch.cat(everyone[:: mesh.size(1)])
        if rank == 0:
            torch.save(measured, folder / run.file)
    torch.distributed.destroy_process_group()


def start_rank(rank, folder) -> int:
    """Fork a process for the rank and return its id."""
    if child := os.fork():
        return child
    try:
        rank_main(rank, folder)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    children = [start_rank(rank, Path(sys.argv[1])) for rank in range(RANKS)]
    # fail if any rank fails
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
