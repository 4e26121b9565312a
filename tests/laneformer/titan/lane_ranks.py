"""Losses and gradients of small models whose lanes are on several ranks, in processes of their own.

    python -m tests.laneformer.titan.lane_ranks FOLDER DTYPE SHARDS LANE_RANKS [NAME=VALUE ...]

Trains on SHARDS x LANE_RANKS gloo ranks one batch of each of CASES, and leaves FOLDER/NAME.pt: losses (B, S), what the
head has seen, and the whole gradient of each parameter. "plant" is a fault: "own-twice" or "no-sum".
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

from train.job_config import patch_torch_for_cpu

patch_torch_for_cpu()  # before TorchTitan is imported

import torch  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Replicate  # noqa: E402
from torchtitan.config import JobConfig  # noqa: E402

from laneformer import LaneformerConfig  # noqa: E402
from laneformer.titan import lane_axis, parallelize  # noqa: E402
from laneformer.titan.spec import LaneformerArgs, TitanLaneformer  # noqa: E402

SHAPES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 16, "head_dim": 2,
    "num_key_value_heads": 8, "num_lanes": 8, "sliding_window": 5, "swa_layers": (0, 1), "vocab_size": 64,
    "max_position_embeddings": 16, "broadcast_delay": 2, "initializer_range": 0.3,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "present": {"broadcast_delay": 0},
    "delay-1": {"broadcast_delay": 1},
    "delay-2": {},
    "local-start": {"use_early_comm": False},
    "sent-again": {"rebroadcast_early": True},
    "late": {"first_late_layer": 3},
    "attention-only": {"use_mlp_comm": False},
    "flush": {"flush": True},
    "flush-1": {"flush": True, "broadcast_delay": 1, "use_early_comm": False},
    "lane-scales": {"replicated_rmsn_scale": False},
    "full": {},
    "selective": {},
}
BATCH, LENGTH = 2, 12


def config(name: str) -> LaneformerConfig:
    return LaneformerConfig.from_flavor("tiny", **{**SHAPES, **CASES[name]})


def tokens() -> torch.Tensor:
    found = torch.randint(3, SHAPES["vocab_size"], (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(7))
    return found


def build(name: str) -> TitanLaneformer:
    model = TitanLaneformer(LaneformerArgs(config=config(name)))
    model.lm_head.chunk_tokens, model.lm_head.z_loss_weight = 5, 0.1
    return model


def measure(model: TitanLaneformer, batch: torch.Tensor) -> dict[str, Any]:
    labels = batch[:, 1:].clone()
    labels[0, :3] = -100
    losses = model(batch[:, :-1], labels)
    weights = torch.linspace(0.5, 1.5, losses.numel(), dtype=losses.dtype).view_as(losses)
    (losses * weights).sum().backward()
    gradients = {
        name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()
    }
    whole = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in gradients.items()}
    return {"losses": losses.detach(), "seen": model.lm_head.seen, "gradients": whole}


def one_case(name: str, dtype: str, shards: int, lane_ranks: int, plant: str) -> dict[str, Any]:
    job = JobConfig()
    job.training.mixed_precision_param = job.training.mixed_precision_reduce = dtype
    job.activation_checkpoint.mode = name if name in ("full", "selective") else "none"
    job.activation_checkpoint.selective_ac_option = "op"
    mesh = init_device_mesh("cpu", (shards, lane_ranks), mesh_dim_names=("fsdp", "tp"))
    torch.set_default_dtype(getattr(torch, dtype))
    with torch.device("meta"):
        model = build(name)
    lane_axis.give_lanes_to_ranks(model, mesh["tp"])
    parallelize.checkpoint_and_compile(model, job)
    parallelize.apply_fsdp(model, mesh["fsdp"], job)
    model.to_empty(device="cpu")
    model.init_weights()
    batch = tokens().chunk(shards)[mesh.get_local_rank("fsdp")]
    torch.manual_seed(0)
    return measure(model, batch)


def rank_main(rank: int, folder: Path, dtype: str, shards: int, lane_ranks: int, plant: str) -> None:
    size = shards * lane_ranks
    store = torch.distributed.FileStore(str(folder / "store"), size)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size, store=store)
    parallelize.TORCH_DTYPE_MAP["float64"] = torch.float64
    if plant == "own-twice":
        lane_axis.LaneAxis.receive = lambda self, sent, first_only=False: lane_axis._Arrive.apply(sent[1], self.group)
    if plant == "no-sum":
        lane_axis.Partial = Replicate
    for name in CASES:
        found = one_case(name, dtype, shards, lane_ranks, plant)
        everyone: list[Any] = [None] * size
        torch.distributed.all_gather_object(everyone, found["losses"])
        for at, losses in enumerate(everyone):
            assert torch.equal(losses, everyone[at // lane_ranks * lane_ranks]), "ranks of one batch agree"
        found["losses"] = torch.cat(everyone[::lane_ranks])
        if rank == 0:
            torch.save(found, folder / f"{name}.pt")
    torch.distributed.destroy_process_group()


def main() -> int:
    folder, dtype, (shards, lane_ranks) = Path(sys.argv[1]), sys.argv[2], map(int, sys.argv[3:5])
    plant = sys.argv[5] if len(sys.argv) > 5 else ""
    torch.set_num_threads(1)
    children = []
    for rank in range(shards * lane_ranks):
        if (child := os.fork()) == 0:
            try:
                rank_main(rank, folder, dtype, shards, lane_ranks, plant)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main())
