"""Check that a job can run as it is set: choices, bounds and contradictions, each refused with one sentence."""

from __future__ import annotations

import dataclasses
import difflib
import json
import operator
import os
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pydantic
import torch

from laneformer.config import FLAVORS

# the converter and its section
FLOAT8 = "quantize.linear.float8"
# settings that TorchTitan declares as plain text, or with more words than the Laneformer knows
CHOICES: dict[str, tuple[str, ...]] = {
    "model.name": ("laneformer",),
    "model.flavor": tuple(FLAVORS),
    "model.converters": (FLOAT8,),
    f"{FLOAT8}.recipe_name": ("tensorwise", "rowwise"),
    "optimizer.name": ("Adam", "AdamW"),
    "compile.components": ("model", "loss"),
    "compile.backend": ("inductor", "aot_eager", "eager"),
}
# features of TorchTitan that the Laneformer or our trainer does not have: the one value that works, and why
ONLY: dict[str, tuple[Any, str]] = {
    "quantize.linear.float8.filter_fqns": (
        [],
        "w1, w2 and w3 of every layer are in float8, and nothing else",
    ),
    "quantize.linear.float8.enable_fsdp_float8_all_gather": (False, "weights travel in bfloat16"),
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": (
        False,
        "weights travel in bfloat16",
    ),
    "optimizer.early_step_in_backward": (False, "the guard judges a step before the weights move"),
    "training.enable_cpu_offload": (False, "gradients and moments stay on the GPU"),
    "parallelism.enable_async_tensor_parallel": (
        False,
        "lanes' sums are asynchronous where they may come late",
    ),
    "parallelism.pipeline_parallel_degree": (1, "use data_parallel_shard_degree (FSDP)"),
    "parallelism.context_parallel_degree": (1, "use data_parallel_shard_degree (FSDP)"),
    "parallelism.expert_parallel_degree": (1, "the Laneformer has no experts"),
    "fault_tolerance.enable": (False, "`python -m train.supervise` restarts jobs"),
    "checkpoint.create_seed_checkpoint": (False, "every world size starts from the same weights"),
    "checkpoint.last_save_in_hf": (
        False,
        "`python -m tools.export_hf` writes Hugging Face folders",
    ),
    "checkpoint.initial_load_in_hf": (
        False,
        "`python -m tools.import_hf --hf DIR --out RUN_DIR` makes a checkpoint of the folder, for "
        "checkpoint.initial_load_path",
    ),
    "checkpoint.exclude_from_loading": (
        [],
        "it would drop these states at every restart too; a new phase takes weights and moments, a restart everything",
    ),
}
BOUNDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "at least 1",
        lambda value: value >= 1,
        "training.steps training.seq_len training.local_batch_size training.global_batch_size training.gc_freq "
        "lr_scheduler.total_steps parallelism.data_parallel_replicate_degree metrics.log_freq validation.freq "
        "parallelism.tensor_parallel_degree "
        "validation.local_batch_size validation.windows_per_source mixture.reader_threads checkpoint.interval "
        "resilience.max_failed_saves resilience.skip_steps resilience.max_fruitless_starts comm.init_timeout_seconds "
        "comm.train_timeout_seconds mtp.steps",
    ),
    (
        "at least 0",
        lambda value: value >= 0,
        "lr_scheduler.warmup_steps optimizer.weight_decay resilience.keep_every_steps resilience.max_loss_z "
        "resilience.max_grad_norm_z resilience.max_skips training.z_loss_weight "
        "resilience.backoff_s resilience.max_backoff_s evals.every_steps mtp.loss_weight mtp.final_loss_weight",
    ),
    (
        "greater than 0",
        lambda value: 0 < value < float("inf"),
        "optimizer.lr optimizer.eps training.max_norm resilience.hang_timeout_s resilience.start_timeout_s "
        "resilience.stop_deadline_s",
    ),
    (
        "between 0 and 1",
        lambda value: 0 <= value <= 1,
        "lr_scheduler.decay_ratio lr_scheduler.min_lr_factor mtp.lower_at",
    ),
    ("at least 0 and below 1", lambda value: 0 <= value < 1, "optimizer.beta1 optimizer.beta2"),
    # a z-score of fewer has no meaning
    ("at least 4", lambda value: value >= 4, "resilience.spike_window"),
    (
        "0 (keep all) or at least 2, as the newest may be half written",
        lambda value: value == 0 or value >= 2,
        "checkpoint.keep_latest_k",
    ),
    (
        "at least 1, or -1 for all that remain",
        lambda value: value >= 1 or value == -1,
        "parallelism.data_parallel_shard_degree",
    ),
)


def check_job(job: Any, world_size: int | None = None) -> None:
    """Raise ValueError, one sentence, for the first setting that cannot work.

    Args:
        world_size: of the workers, if known.
    """
    problems = (
        find_wrong_types(job),
        find_wrong_values(job),
        find_contradictions(job),
        find_misfits(job, world_size),
    )
    # lazily: later checks compare values whose types the earlier ones have verified
    for problem in (message for check in problems for message in check):
        raise ValueError(problem)


def check_local_ranks() -> None:
    """Raise ValueError where this machine has more workers than GPUs."""
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if 0 < gpus < ranks:
        raise ValueError(
            f"torchrun has started {ranks} workers on this machine, which has {gpus} GPU(s), and each worker "
            f"needs one of its own; start it with --nproc_per_node={gpus}"
        )


def find_wrong_types(section: Any, prefix: str = "") -> Iterator[str]:
    """Find settings whose value is not what their field declares, in every section."""
    for field in dataclasses.fields(section):
        name, value, hint = prefix + field.name, getattr(section, field.name), field.type
        if dataclasses.is_dataclass(value):
            yield from find_wrong_types(value, f"{name}.")
        elif not fits(value, hint):
            choices = sorted(list_literals(hint))
            yield format_refusal(
                name,
                value,
                suggest(value, choices) if choices else f"must be {describe_type(hint)}",
            )


def fits(value: Any, hint: Any) -> bool:
    """Tell whether a value from a job file is of a declared type."""
    try:
        # TorchTitan's parser checks only the command line, not the job file
        # as JSON: an array is a list or a tuple, and a text no number
        pydantic.TypeAdapter(hint).validate_json(json.dumps(value), strict=True)
    except pydantic.ValidationError:
        return False
    return True


def list_literals(hint: Any) -> set[str]:
    inside = typing.get_args(hint)
    return (
        set(inside)
        if typing.get_origin(hint) is typing.Literal
        else {word for part in inside for word in list_literals(part)}
    )


def describe_type(hint: Any) -> str:
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(
        hint, str(hint)
    )


def suggest(value: Any, choices: list[str]) -> str:
    wrong = (
        next((choice for choice in value if choice not in choices), value)
        if isinstance(value, list)
        else value
    )
    # difflib tells upper from lower case, which is what users get wrong most
    near = [choice for choice in choices if choice.lower() == str(wrong).lower()]
    near = near or difflib.get_close_matches(str(wrong), choices, n=1, cutoff=0.4)
    return f"choose from {', '.join(choices)}" + (f"; did you mean {near[0]!r}?" if near else "")


def format_refusal(name: str, value: Any, allowed: str) -> str:
    return f"{name} = {value!r} is not possible: {allowed}"


def find_wrong_values(job: Any) -> Iterator[str]:
    """Find settings outside of the tables above."""

    def value_of(name: str) -> Any:
        return operator.attrgetter(name)(job)

    for name, choices in CHOICES.items():
        value = value_of(name)
        if value is not None and not set(value if isinstance(value, list) else [value]) <= set(
            choices
        ):
            yield format_refusal(name, value, suggest(value, list(choices)))
    for name, (only, why) in ONLY.items():
        if value_of(name) != only:
            yield format_refusal(name, value_of(name), f"only {only!r} is supported; {why}")
    for allowed, possible, names in BOUNDS:
        for name in names.split():
            if value_of(name) is not None and not possible(value_of(name)):
                yield format_refusal(name, value_of(name), f"it must be {allowed}")


def find_contradictions(job: Any) -> Iterator[str]:
    """Find settings that are possible each, but not together."""
    steps, schedule, section = job.training.steps, job.lr_scheduler, job.checkpoint
    total = schedule.total_steps
    # step total + 1 has exactly the minimum, which a decay branch uses
    if total is not None and steps > total + 1:
        yield (
            f"training.steps = {steps} goes on after the learning rate's schedule has ended, lr_scheduler.total_steps "
            f"= {total}; raise total_steps (the decay moves with it), or train at most {total + 1} steps"
        )
    if total is not None and schedule.warmup_steps > total:
        yield format_refusal(
            "lr_scheduler.warmup_steps",
            schedule.warmup_steps,
            f"total_steps is {total}; it must be less",
        )
    if (
        job.model.converters
        and not job.quantize.linear.float8.emulate
        and job.training.mixed_precision_param != "bfloat16"
    ):
        yield format_refusal(
            "training.mixed_precision_param",
            job.training.mixed_precision_param,
            f"float8 products give bfloat16; set it, or {FLOAT8}.emulate = true",
        )
    if section.initial_load_all_states and not section.initial_load_path:
        yield "checkpoint.initial_load_all_states = True needs checkpoint.initial_load_path, where to go on from"
    if job.mtp.freeze_base and section.initial_load_path and not section.initial_load_model_only:
        yield (
            "mtp.freeze_base = True needs checkpoint.initial_load_model_only = true: the optimizer has the head's "
            "moments alone"
        )
    evals = job.evals
    if evals.in_loop and (
        evals.every_steps < 1 or evals.every_steps % section.interval or not evals.commands
    ):
        yield (
            f"evals.in_loop evaluates saved checkpoints: it needs evals.commands, and evals.every_steps = "
            f"{evals.every_steps} must be a multiple of checkpoint.interval = {section.interval}"
        )
    if job.validation.enable and job.validation.freq % job.metrics.log_freq:
        yield (
            f"validation.freq = {job.validation.freq} is not a multiple of metrics.log_freq = {job.metrics.log_freq}; "
            "a validation loss stands in the row of its step, so choose a multiple"
        )


def find_misfits(job: Any, world_size: int | None) -> Iterator[str]:
    """Find a batch or mesh that does not fit the other, or the number of workers."""
    training, parallelism = job.training, job.parallelism
    replicas, shards = (
        parallelism.data_parallel_replicate_degree,
        parallelism.data_parallel_shard_degree,
    )
    lane_ranks = parallelism.tensor_parallel_degree
    ranks = world_size or (replicas * shards * lane_ranks if shards != -1 else None)
    if ranks is None:
        return
    if ranks % (replicas * lane_ranks) or (
        shards != -1 and replicas * shards * lane_ranks != ranks
    ):
        lanes = f" times tensor_parallel_degree = {lane_ranks}" if lane_ranks > 1 else ""
        yield (
            f"{ranks} workers do not form a mesh of data_parallel_replicate_degree = {replicas} times "
            f"data_parallel_shard_degree = {shards}{lanes}; start {replicas * max(shards, 1) * lane_ranks}, or "
            "change the degrees"
        )
    elif replicas > 1 and ranks == replicas * lane_ranks:
        yield (
            f"data_parallel_replicate_degree = {replicas} with shard degree 1 is plain DDP, which torchtitan 0.2.2 "
            "trains with gradients twice divided by the ranks; use data_parallel_shard_degree >= 2"
        )
    if problem := find_batch_problem(
        training.global_batch_size, training.local_batch_size, ranks, lane_ranks
    ):
        yield problem


def find_batch_problem(
    global_batch: int, local_batch: int, ranks: int, lane_ranks: int = 1
) -> str | None:
    """Say why a step's sequences cannot be dealt to the ranks in whole micro-batches; None if they can.

    Args:
        lane_ranks: ranks that share each sequence, by its lanes.
    """
    # ranks that share the lanes of a sequence read the same sequences
    groups = ranks // lane_ranks
    if global_batch % (local_batch * groups) == 0:
        return None
    units = "GPUs" if lane_ranks == 1 else f"groups of {lane_ranks} GPUs"
    fix = f"a number of {units} that divides {global_batch}"
    if global_batch % groups == 0:
        fix = f"a local batch that divides {global_batch // groups}"
    return (
        f"training.global_batch_size = {global_batch} is not a multiple of {groups} {units} x local_batch_size = "
        f"{local_batch}; choose {fix}"
    )
