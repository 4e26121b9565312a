"""The arithmetic of a training run before it runs: tokens, FLOPs, time, memory,
checkpoints, data, network traffic.

Everything follows from the job file, the architecture and a datasheet, but for an estimate, named
as such, the usable share of a GPU's memory, and one figure counted in generated code, what a
layer's backward pass allocates.

Where lanes are on several ranks (`lane_ranks`), it is calculated from how they exchange; no GPU has shown it.

    P parameters   L lanes   D hidden   F intermediate   V vocabulary   B local batch   S sequence
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from laneformer.config import LaneformerConfig
from laneformer.engine.cuda.cards import Card
from laneformer.flops import flops_per_token
from laneformer.joins import MODULES, Join
from laneformer.titan.loss import CHUNK_TOKENS
from records.checkpoints import BYTES_PER_PARAMETER
from train.job_checks import batch_problem

Facts = dict[str, float]
FP32, BF16 = 4, 2
USABLE = 0.92  # of a GPU's memory; the rest is CUDA's context, NCCL's buffers and the allocator's gaps: an estimate
NIC_BYTES_PER_S = 400e9 / 8  # of each GPU and direction: 400 Gbit/s
RESTART_S = 600  # from a failure to the first step of the next attempt: an estimate
LAYERS_IN_FLIGHT = 2  # FSDP gathers one layer while another one computes
# streams beside the kept activations at the peak, in the last layer's backward pass: the gradient that enters
# it, and what it holds beyond what it has freed; counted at commit 04aeaa48 by tools.bench train-traffic
WIDE_IN_BACKWARD = {"": 3.0, "rowwise": 2.5, "tensorwise": 3.3}  # by float8 recipe


@dataclass(frozen=True)
class Cluster:
    """The hardware of a job, and its expected speed."""

    gpus: int
    gpus_per_node: int
    gpu: Card
    tokens_per_s_per_gpu: float


@dataclass(frozen=True)
class Job:
    """The job settings that the sums need. `shard`, `replicate` and `lane_ranks` are the mesh: HSDP, or
    FSDP with replicate 1, of groups of ranks that share a sequence by its lanes.
    """

    config: LaneformerConfig
    seq_len: int
    steps: int
    global_batch: int
    local_batch: int
    shard: int
    replicate: int = 1
    lane_ranks: int = 1
    checkpointing: str = "selective"  # or none, full
    reshard: bool = True  # layers are gathered again for the backward pass
    checkpoint_interval: int = 1
    keep_latest: int = 1
    keep_every: int = 0  # steps between checkpoints that are never deleted, 0: none
    param_bytes: int = BF16
    reduce_bytes: int = FP32
    float8: str = ""  # recipe of w1, w2 and w3

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len

    @property
    def micro_batches(self) -> int:
        return self.global_batch // (self.local_batch * self.shard * self.replicate)


def check(job: Job, cluster: Cluster) -> None:
    """ValueError when mesh, batch and cluster do not fit each other."""
    mesh = job.shard * job.replicate * job.lane_ranks
    if mesh != cluster.gpus:
        raise ValueError(
            f"the mesh has {job.replicate} x {job.shard} x {job.lane_ranks} = {mesh} GPUs, --gpus is {cluster.gpus}; "
            f"give --gpus {mesh} or --parallelism.data_parallel_replicate_degree and "
            "--parallelism.data_parallel_shard_degree"
        )
    if problem := batch_problem(job.global_batch, job.local_batch, mesh, job.lane_ranks):
        raise ValueError(problem)


def compute(job: Job, cluster: Cluster) -> Facts:
    """Tokens, FLOPs, steps and days at the expected speed."""
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
    """Of one rank of a group, before FSDP: a layer's matrices, the head, what every rank has, total."""
    counts = job.config.parameter_count()
    layer, head = (counts[name] / job.lane_ranks for name in ("layer", "lm_head"))
    common = counts["embedding"] + (counts["norms"] if job.config.replicated_rmsn_scale else 0)
    total = common + (counts["total"] - common) / job.lane_ranks
    return {"layer": layer, "lm_head": head, "common": common, "total": total}


def exchanged(job: Job, layer: int) -> int:
    """Sums (B, S, D) over all lanes that a group's ranks make of a layer's outputs; none if a rank has all."""
    config = job.config
    if job.lane_ranks == 1:
        return 0
    return sum(
        config.join(layer, module) == Join.PRESENT
        or config.broadcasts(layer, module)
        or config.delivers(layer, module)
        for module in MODULES
    )


def kept_per_token(job: Job, layer: int) -> float:
    """Values (not bytes) of one token that a compiled layer keeps from its forward for its backward pass.

    Its input streams, which are one as long as the lanes' are equal, the streams between attention and MLP,
    both also normed, and the narrow products; without checkpointing that is the most, as the compiler may
    recompute some. In float8 the MLP's normed streams and w2's input are a byte each. Full keeps inputs
    alone, and so the delayed attention output, until the layer's backward pass computes the rest again. Sums
    over ranks are always kept: they are not sent for twice.
    """
    config = job.config
    d, wide = config.hidden_size, config.num_lanes * config.hidden_size / job.lane_ranks
    sums = exchanged(job, layer) * d
    equal = config.equal_streams(layer)
    before = d if equal else wide
    if job.checkpointing == "full":
        return before + sums + (wide if config.adds_delayed(layer, "attention") else 0)
    between = d if equal and config.join(layer, "attention") == Join.PRESENT else wide
    kv = config.head_dim * config.num_key_value_heads
    narrow = (2 * d + 2 * kv + 2 * config.intermediate_size) / job.lane_ranks
    if job.float8:
        return (
            2 * before + between + narrow + (between + config.intermediate_size) / job.param_bytes
        )
    return 2 * (before + between) + narrow + sums


def memory(job: Job) -> dict[str, float]:
    """Bytes on one GPU at the peak: states exactly, gathers and activations as estimated."""
    config, counts = job.config, rank_parameters(job)
    micro = job.local_batch * job.seq_len
    stream = micro * config.hidden_size * job.param_bytes
    wide = stream * config.num_lanes / job.lane_ranks
    own = counts["total"] / job.shard
    gathered = (
        LAYERS_IN_FLIGHT * counts["layer"] + counts["lm_head"] if job.reshard else counts["total"]
    )
    chunk = min(CHUNK_TOKENS, micro) if config.lm_head_type == "vocab_parallel" else micro
    # a chunk's logits, widened, and their gradient; the head's gradient in float32; streams,
    # normed, their gradient
    vocabulary = config.vocab_size / job.lane_ranks
    head = chunk * vocabulary * (job.param_bytes + 2 * FP32) + FP32 * counts["lm_head"] + 3 * wide
    by_layer = [kept_per_token(job, i) for i in range(config.num_hidden_layers)]
    whole = dataclasses.replace(job, checkpointing="none")
    # of the layer whose backward pass is under way: what it has not kept
    again = (
        max(kept_per_token(whole, i) - kept for i, kept in enumerate(by_layer))
        * micro
        * job.param_bytes
    )
    # gradients of sums on their way
    late = 0 if job.lane_ranks == 1 else len(MODULES) * config.broadcast_delay * stream
    # unsharded gradients
    in_flight = LAYERS_IN_FLIGHT * counts["layer"] * (job.param_bytes + job.reduce_bytes)
    parts = {
        "weights": FP32 * own,
        "moments": (BYTES_PER_PARAMETER - FP32) * own,
        "gradients": FP32 * own,
        "gathered": job.param_bytes * gathered + in_flight,
        "kept_activations": sum(by_layer) * micro * job.param_bytes,
        "working_set": max(head, WIDE_IN_BACKWARD[job.float8] * wide + again + late),
    }
    return {**parts, "total": sum(parts.values())}


def largest_local_batch(job: Job, gpu: Card) -> int:
    """The largest power of two up to 64 whose step fits the GPU, 0 if not even one sequence does."""
    used = {
        n: memory(dataclasses.replace(job, local_batch=n))["total"]
        for n in (1, 2, 4, 8, 16, 32, 64)
    }
    return max((n for n, size in used.items() if size <= USABLE * gpu.memory_bytes), default=0)


def checkpoints(job: Job, cluster: Cluster) -> Facts:
    """Size, cadence, storage under retention, and what a failure costs on average."""
    full_bytes = BYTES_PER_PARAMETER * job.config.parameter_count()["total"]
    step_s = compute(job, cluster)["step_s"]
    written = -(-job.steps // job.checkpoint_interval)
    kept_milestones = job.steps // job.keep_every if job.keep_every else 1  # the last one at least
    lost_s = job.checkpoint_interval / 2 * step_s + RESTART_S
    return {
        "bytes": full_bytes,
        "every_s": job.checkpoint_interval * step_s,
        "written": written,
        "bytes_kept": (job.keep_latest + kept_milestones) * full_bytes,
        "hours_lost_per_failure": lost_s / 3600,
    }


def traffic(job: Job, cluster: Cluster) -> Facts:
    """Bytes that a GPU receives in one step, by collective, and the seconds of each.

    Shards exchange in every micro-batch, replicas once a step. Shards inside a node travel over NVLink. Shards across
    nodes pass the network: at best a node receives each byte once and its NICs share the work; a ring that ignores the
    nodes would bring every byte over every NIC. Ranks of one group exchange sums of their lanes over NVLink:
    `lanes_bytes`, and of one layer in one micro-batch.
    """
    counts, group, shard, replicate = rank_parameters(job), job.lane_ranks, job.shard, job.replicate
    # the head is gathered once
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
    # of what a GPU needs from other shards, the part that other nodes hold
    outside = within / others * (nodes - 1) / nodes if nodes > 1 else 0.0
    nic = all_reduce + outside / min(shard, in_node)
    # a layer's sums, forward and backward, and the gradients of what every lane has; each an all-reduce
    stream = job.local_batch * job.seq_len * job.config.hidden_size * job.param_bytes
    ring = 2 * (group - 1) / group
    layers = [2 * exchanged(job, i) * stream * ring for i in range(job.config.num_hidden_layers)]
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
