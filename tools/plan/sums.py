"""Calculate a training run: tokens, FLOPs, time, memory, checkpoints, data, traffic.

P parameters   L lanes   D hidden   F intermediate   V vocabulary   B local batch   S sequence
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from laneformer.config import LaneformerConfig
from laneformer.engine.cuda.cards import Card
from laneformer.flops import flops_per_token
from laneformer.joins import MODULES, Join
from laneformer.titan.loss import CHUNK_TOKENS
from records.checkpoints import BYTES_PER_PARAMETER
from train.job_checks import find_batch_problem

Facts = dict[str, float]
FP32, BF16 = 4, 2
# of a GPU's memory; the rest is CUDA's context, NCCL's buffers and the allocator's gaps: an estimate
USABLE = 0.92
# of each GPU and direction: 400 Gbit/s
NIC_BYTES_PER_S = 400e9 / 8
# from a failure to the first step of the next attempt: an estimate
RESTART_S = 600
# FSDP gathers one layer while another one computes
LAYERS_IN_FLIGHT = 2
# streams beside the kept activations at the peak, in the last layer's backward pass: the gradient
# that enters it, and what it holds beyond what it has freed; counted at commit 04aeaa48 by
# tools.bench train-traffic
WIDE_IN_BACKWARD = {"": 3.0, "rowwise": 2.5, "tensorwise": 3.3}  # by float8 recipe


@dataclass(frozen=True)
class Cluster:
    gpus: int
    gpus_per_node: int
    gpu: Card
    tokens_per_s_per_gpu: float


@dataclass(frozen=True)
class Job:
    """The job settings that the sums need.

    `shard`, `replicate` and `lane_ranks` are the mesh: HSDP, or FSDP with replicate 1, of groups of
    ranks that share a sequence by its lanes.
    """

    config: LaneformerConfig
    seq_len: int
    steps: int
    global_batch: int
    local_batch: int
    shard: int
    replicate: int = 1
    # calculated from the lanes' exchanges; no GPU has shown it
    lane_ranks: int = 1
    # or none, full
    checkpointing: str = "selective"
    # layers are gathered again for the backward pass
    reshard: bool = True
    # 0: none is written
    checkpoint_interval: int = 1
    # 0: all
    keep_latest: int = 1
    # steps between checkpoints that are never deleted, 0: none
    keep_every: int = 0
    param_bytes: int = BF16
    reduce_bytes: int = FP32
    # recipe of w1, w2 and w3
    float8: str = ""

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len

    @property
    def micro_batches(self) -> int:
        return self.global_batch // (self.local_batch * self.shard * self.replicate)


def check(job: Job, cluster: Cluster) -> None:
    """Raise ValueError when mesh, batch and cluster do not fit each other."""
    mesh = job.shard * job.replicate * job.lane_ranks
    if mesh != cluster.gpus:
        raise ValueError(
            f"the mesh has {job.replicate} x {job.shard} x {job.lane_ranks} = {mesh} GPUs, --gpus is {cluster.gpus}; "
            f"give --gpus {mesh} or --parallelism.data_parallel_replicate_degree and "
            "--parallelism.data_parallel_shard_degree"
        )
    if problem := find_batch_problem(job.global_batch, job.local_batch, mesh, job.lane_ranks):
        raise ValueError(problem)


def compute(job: Job, cluster: Cluster) -> Facts:
    tokens = job.steps * job.tokens_per_step
    flops = flops_per_token(job.config, job.seq_len)
    step_s = job.tokens_per_step / (cluster.gpus * cluster.tokens_per_s_per_gpu)
    return {
        "steps": job.steps,
        "tokens_per_step": job.tokens_per_step,
        "tokens": tokens,
        "flops_per_token": flops,
        "flops": flops * tokens,
        "mfu_percent": 100 * cluster.tokens_per_s_per_gpu * flops / cluster.gpu.peak_flops,
        "step_s": step_s,
        "days": job.steps * step_s / 86400,
        "gpu_hours": cluster.gpus * job.steps * step_s / 3600,
    }


def tokens_per_s_at(mfu_percent: float, job: Job, gpu: Card) -> float:
    return mfu_percent / 100 * gpu.peak_flops / flops_per_token(job.config, job.seq_len)


def rank_parameters(job: Job) -> Facts:
    """Count one rank's parameters before FSDP: a layer's matrices, head, common ones, total."""
    counts = job.config.parameter_count()
    layer, head = (counts[name] / job.lane_ranks for name in ("layer", "lm_head"))
    common = counts["embedding"] + (counts["norms"] if job.config.replicated_rmsn_scale else 0)
    total = common + (counts["total"] - common) / job.lane_ranks
    return {"layer": layer, "lm_head": head, "common": common, "total": total}


def count_exchanges(job: Job, layer: int) -> int:
    """Count the sums (B, S, D) over all lanes that a group's ranks make of a layer's outputs."""
    config = job.config
    if job.lane_ranks == 1:
        return 0
    return sum(
        config.join(layer, module) == Join.PRESENT
        or config.broadcasts(layer, module)
        or config.delivers(layer, module)
        for module in MODULES
    )


def count_kept_values(job: Job, layer: int) -> float:
    """Count values (not bytes) of a token that a compiled layer keeps for its backward pass."""
    config = job.config
    d, wide = config.hidden_size, config.num_lanes * config.hidden_size / job.lane_ranks
    sums = count_exchanges(job, layer) * d
    equal = config.equal_streams(layer)
    before = d if equal else wide
    # sums over ranks are always kept: they are not sent for twice
    if job.checkpointing == "full":
        # inputs alone, until the backward pass computes the rest again
        return before + sums + (wide if config.adds_delayed(layer, "attention") else 0)
    between = d if equal and config.join(layer, "attention") == Join.PRESENT else wide
    kv = config.head_dim * config.num_key_value_heads
    narrow = (2 * d + 2 * kv + 2 * config.intermediate_size) / job.lane_ranks
    if job.float8:
        # the MLP's normed streams and w2's input are a byte each
        return (
            2 * before + between + narrow + (between + config.intermediate_size) / job.param_bytes
        )
    # streams in front of both modules, also normed, and the narrow products
    return 2 * (before + between) + narrow + sums


def memory(job: Job) -> dict[str, float]:
    """Return bytes on one GPU at the peak: states exactly, gathers and activations as estimated."""
    config, counts = job.config, rank_parameters(job)
    micro = job.local_batch * job.seq_len
    stream = micro * config.hidden_size * job.param_bytes
    wide = stream * config.num_lanes / job.lane_ranks
    shard = counts["total"] / job.shard
    gathered = (
        LAYERS_IN_FLIGHT * counts["layer"] + counts["lm_head"] if job.reshard else counts["total"]
    )
    chunk = min(CHUNK_TOKENS, micro) if config.lm_head_type == "vocab_parallel" else micro
    # a chunk's logits, widened, and their gradient; the head's gradient in float32; streams,
    # normed, their gradient
    vocabulary = config.vocab_size / job.lane_ranks
    head = chunk * vocabulary * (job.param_bytes + 2 * FP32) + FP32 * counts["lm_head"] + 3 * wide
    by_layer = [count_kept_values(job, i) for i in range(config.num_hidden_layers)]
    whole = dataclasses.replace(job, checkpointing="none")
    # of the layer whose backward pass is under way: what it has not kept
    again = (
        max(count_kept_values(whole, i) - values for i, values in enumerate(by_layer))
        * micro
        * job.param_bytes
    )
    # gradients of sums on their way
    late = 0 if job.lane_ranks == 1 else len(MODULES) * config.broadcast_delay * stream
    # unsharded gradients
    in_flight = LAYERS_IN_FLIGHT * counts["layer"] * (job.param_bytes + job.reduce_bytes)
    parts = {
        "weights": FP32 * shard,
        "moments": (BYTES_PER_PARAMETER - FP32) * shard,
        "gradients": FP32 * shard,
        "gathered": job.param_bytes * gathered + in_flight,
        "kept_activations": sum(by_layer) * micro * job.param_bytes,
        "working_set": max(head, WIDE_IN_BACKWARD[job.float8] * wide + again + late),
    }
    return {**parts, "total": sum(parts.values())}


def largest_local_batch(job: Job, gpu: Card) -> int:
    """Return the largest power of two up to 64 whose step fits the GPU; 0 if none does."""
    used = {
        n: memory(dataclasses.replace(job, local_batch=n))["total"]
        for n in (1, 2, 4, 8, 16, 32, 64)
    }
    return max((n for n, size in used.items() if size <= USABLE * gpu.memory_bytes), default=0)


def checkpoints(job: Job, cluster: Cluster) -> Facts:
    """Return size, cadence, storage under retention, and the average cost of a failure."""
    full_bytes = BYTES_PER_PARAMETER * job.config.parameter_count()["total"]
    step_s = compute(job, cluster)["step_s"]
    interval = job.checkpoint_interval
    written = math.ceil(job.steps / interval) if interval else 0
    # while one is written, the newest before it are still there
    stored = written
    if job.keep_latest and interval:
        milestones = job.steps // math.lcm(interval, job.keep_every) if job.keep_every else 1
        stored = min(written, job.keep_latest + milestones)
    # half an interval on average, without checkpoints half the run
    lost_s = (interval or job.steps) / 2 * step_s + RESTART_S
    return {
        "bytes": full_bytes,
        "every_s": interval * step_s,
        "written": written,
        "bytes_kept": stored * full_bytes,
        "hours_lost_per_failure": lost_s / 3600,
    }


def traffic(job: Job, cluster: Cluster) -> Facts:
    """Return bytes that a GPU receives in one step, by collective, and the seconds of each."""
    counts, group, shard, replicate = rank_parameters(job), job.lane_ranks, job.shard, job.replicate
    # shards exchange in every micro-batch, replicas once a step; the head is gathered once
    gathers = 2 * counts["total"] - counts["lm_head"] if job.reshard else counts["total"]
    others = (shard - 1) / shard
    all_gather = job.micro_batches * job.param_bytes * gathers * others
    reduce_scatter = job.micro_batches * job.reduce_bytes * counts["total"] * others
    all_reduce = job.reduce_bytes * counts["total"] / shard * 2 * (replicate - 1) / replicate
    # a group's ranks are neighbours, so its shards are that far apart
    nodes, in_node = (
        -(-shard * group // cluster.gpus_per_node),
        max(cluster.gpus_per_node // group, 1),
    )
    within = all_gather + reduce_scatter
    # of what a GPU needs from other shards, the part that other nodes hold; at best a node receives
    # each byte once and its NICs share the work
    outside = within / others * (nodes - 1) / nodes if nodes > 1 and shard > 1 else 0.0
    nic = all_reduce + outside / min(shard, in_node)
    # a layer's sums, forward and backward, and the gradients of what every lane has; each an
    # all-reduce
    stream = job.local_batch * job.seq_len * job.config.hidden_size * job.param_bytes
    ring = 2 * (group - 1) / group
    layers = [
        2 * count_exchanges(job, i) * stream * ring for i in range(job.config.num_hidden_layers)
    ]
    lanes = job.micro_batches * (sum(layers) + counts["common"] * job.param_bytes * ring)
    return {
        "lanes_bytes": lanes,
        "lanes_of_a_layer_bytes": max(layers),
        "all_gather_bytes": all_gather,
        "reduce_scatter_bytes": reduce_scatter,
        "all_reduce_bytes": all_reduce,
        "nic_bytes": nic,
        "lanes_s": lanes / cluster.gpu.link_bytes_per_s,
        "nvlink_s": within / cluster.gpu.link_bytes_per_s,
        "nic_s": nic / NIC_BYTES_PER_S,
    }
