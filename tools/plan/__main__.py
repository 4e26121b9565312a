"""Estimate what a training run costs, before anything runs.

    python -m tools.plan configs/phase1.toml configs/phase2.toml
    python -m tools.plan configs/phase1.toml --gpu h200 --mfu 40 --training.local_batch_size 8
    python -m tools.plan configs/phase1.toml --dry-run

Several job files are phases of one run: their tokens, days and sources add up. TorchTitan's flags follow the
job files; with --metrics.gpu_hour_price there is a cost. Another recipe than the job's is that of the folder of its
lock: --mixture.lock data/nemotron-code/phase.lock.json. With --dry-run the real trainer takes one step as rank 0 of
the whole world, on this machine's CPU with a fake network (`take_step` lists what that checks). The last line of
stdout is JSON.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro
from rich.console import Console
from rich.markdown import Markdown

from data_mixtures import recipe, recipe_file
from data_mixtures.mixture import read_lock
from laneformer.config import LaneformerConfig
from laneformer.engine.cuda.cards import card_named
from records.command import Count, Percent, Positive, check_ranges, run_command
from records.files import read_lines
from records.job import job_flags
from records.usage import cost
from tools import ROOT
from tools.markdown import records
from tools.plan import preparation
from tools.synthetic import write_synthetic_lock

# not here: what imports torch, which takes many seconds and --help does not need
if TYPE_CHECKING:
    from tools.plan import sums

Result = dict[str, Any]


@dataclass
class Options:
    """Print the plan of one run, phase by phase."""

    configs: tyro.conf.Positional[tuple[Path, ...]]
    """Job files, in the order in which they run."""
    gpus: Count = 192
    """GPUs of the job; must equal the size of the mesh."""
    gpus_per_node: Count = 8
    """GPUs that share NVLink."""
    gpu: str = "h100"
    """GPU model, for its datasheet: h100, h200, a100, b200 or another of engine/cuda/cards.toml."""
    tokens_per_s_per_gpu: Positive = 17_000
    """Expected speed; the default is the published run's."""
    mfu: Percent | None = None
    """Expected speed as a percentage of the GPU's dense BF16 FLOPs, in place of tokens per second."""
    data: Path | None = None
    """Data folder whose plan.json lists the files of the sources, for `files` (python -m data_mixtures plan).
    """
    dry_run: bool = False
    """Also take one step of each job with a fake network of all GPUs."""


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    # TorchTitan's flags have a dot in their names
    titans = (i for i, a in enumerate(arguments) if a.startswith("--") and "." in a.split("=")[0])
    first = next(titans, len(arguments))
    options = tyro.cli(
        Options, args=arguments[:first], prog="python -m tools.plan", description=__doc__
    )
    check_ranges(Options, vars(options))
    result = plan(options, arguments[first:])
    show(result, Console(width=None if sys.stdout.isatty() else 120))
    print(json.dumps(result))


def plan(options: Options, overrides: list[str]) -> Result:
    """Return every figure of the plan; ValueError where job, mesh and GPUs do not fit."""
    if not options.configs:
        raise ValueError("no job file given; for example configs/phase1.toml")
    # of each source, by all phases so far
    tokens_read: dict[str, float] = {}
    phases = [plan_phase(options, path, overrides, tokens_read) for path in options.configs]
    rows = preparation.parts(phases[-1]["data"], preparation.list_files(options.data))
    names = ("steps", "tokens", "flops", "days", "gpu_hours")
    total = {name: sum(phase["compute"][name] for phase in phases) for name in names}
    costs = [phase["compute"]["cost"] for phase in phases]
    total["cost"] = None if None in costs else sum(costs)
    return {
        "phases": phases,
        "total": total,
        "preparation": {"parts": rows, "total": preparation.totals(rows)},
    }


def plan_phase(
    options: Options, path: Path, overrides: list[str], tokens_read: dict[str, float]
) -> Result:
    """Plan one phase and add its tokens of each source to `tokens_read`."""

    from tools.plan import sums
    from train.job_config import load_job

    card = card_named(options.gpu)
    if math.isnan(card.peak_flops):
        raise ValueError(f"--gpu {options.gpu}: its maker states no FLOP/s in bf16; choose another")
    titan_job = load_job(["--job.config_file", str(path), *overrides])
    job, rate = read_sizes(titan_job, options.gpus), options.tokens_per_s_per_gpu
    if options.mfu is not None:
        rate = sums.tokens_per_s_at(options.mfu, job, card)
    cluster = sums.Cluster(options.gpus, options.gpus_per_node, card, rate)
    sums.check(job, cluster)
    compute: Result = sums.compute(job, cluster)
    memory = sums.memory(job)
    compute["cost"] = cost(compute["gpu_hours"], asdict(titan_job.metrics))
    usable_bytes = sums.USABLE * card.memory_bytes
    phase: Result = {
        "job": asdict(job) | {"config": str(path), "micro_batches": job.micro_batches},
        "parameters": job.config.parameter_count(),
        "compute": compute,
        "memory": memory,
        "gpu": {
            "usable_bytes": usable_bytes,
            "verdict": "fits" if memory["total"] <= usable_bytes else "DOES NOT FIT",
            "largest_local_batch": sums.largest_local_batch(job, card),
        },
        "checkpoints": sums.checkpoints(job, cluster),
        "traffic": sums.traffic(job, cluster),
        "dry_run": take_step(path, overrides, titan_job, options.gpus) if options.dry_run else None,
        "data": [],
    }
    sources = read_sources(path, titan_job)
    for source in sources:
        tokens = compute["tokens"] * source["weight"] / sum(other["weight"] for other in sources)
        so_far = tokens_read[source["name"]] = tokens_read.get(source["name"], 0.0) + tokens
        epochs = so_far / source["expected_tokens"] if source["expected_tokens"] else None
        phase["data"].append(
            {**source, "tokens": tokens, "tokens_so_far": so_far, "epochs_so_far": epochs}
        )
    return phase


def read_sizes(titan_job: Any, gpus: int) -> sums.Job:
    from laneformer.titan.float8 import float8_of
    from tools.plan import sums
    from train.job_config import read_model_args

    training, mesh, checkpoint = titan_job.training, titan_job.parallelism, titan_job.checkpoint
    shard, replicate = mesh.data_parallel_shard_degree, mesh.data_parallel_replicate_degree
    lane_ranks = mesh.tensor_parallel_degree
    bytes_of = {"bfloat16": sums.BF16, "float32": sums.FP32}
    float8 = float8_of(titan_job)
    return sums.Job(
        config=read_model_args(titan_job).config,
        seq_len=training.seq_len,
        steps=training.steps,
        global_batch=training.global_batch_size,
        local_batch=training.local_batch_size,
        shard=gpus // (replicate * lane_ranks) if shard == -1 else shard,
        replicate=replicate,
        lane_ranks=lane_ranks,
        checkpointing=titan_job.activation_checkpoint.mode,
        reshard=mesh.fsdp_reshard_after_forward != "never",
        checkpoint_interval=checkpoint.interval if checkpoint.enable else 0,
        keep_latest=checkpoint.keep_latest_k,
        keep_every=titan_job.resilience.keep_every_steps,
        param_bytes=bytes_of[training.mixed_precision_param],
        reduce_bytes=bytes_of[training.mixed_precision_reduce],
        float8=float8.recipe.name if float8 else "",
    )


def read_sources(path: Path, titan_job: Any) -> list[Result]:
    """Return name, category, weight and expected tokens (None: unknown) of each source.

    From the job's lock, else from the recipe that the lock's folder is named after; else empty.
    """
    lock = Path(titan_job.mixture.lock)
    if lock.is_file():
        locked = read_lock(lock)
        return [
            {
                "name": source["name"],
                "category": source["category"],
                "weight": source["weight"],
                "expected_tokens": source["windows"] * locked["seq_len"],
                "files": None,
                "prepared": True,
            }
            for source in locked["sources"]
        ]
    # data/nemotron/phase1.lock.json: nemotron
    file = ROOT / "data_mixtures" / f"{lock.parent.name}.toml"
    if not file.is_file():
        return []
    read, phase = recipe_file.load(file), titan_job.phase.name
    if phase not in read.phases:
        raise ValueError(
            f"{file} has no [{phase}], the phase.name of {path}; it has {list(read.phases)}"
        )
    return [
        {
            "name": source.name,
            "category": source.category,
            "weight": read.phases[phase][source.name],
            "expected_tokens": source.expected_tokens_b and source.expected_tokens_b * 1e9,
            "files": source.files if isinstance(source, recipe.HubSource) else None,
            "prepared": False,
        }
        for source in read.sources
    ]


def take_step(config: Path, overrides: list[str], titan_job: Any, world_size: int) -> Result:
    """Take one step of the real trainer as rank 0 of the whole world; returns what was logged.

    Checked are the job, the mesh of all ranks, batches, rank 0's shard of every parameter, its data, optimizer,
    schedule, and a step through FSDP; not checked are collectives, memory, mixed precision and compile.

    Raises:
        ValueError: with the end of the trainer's output.
    """
    # widths and lanes are the job's own; one layer and a short sequence fit a CPU's memory and
    # minutes
    training, seq_len = titan_job.training, 16
    flavor = LaneformerConfig.from_flavor(titan_job.model.flavor)
    vocab_size = titan_job.architecture.vocab_size or flavor.vocab_size
    with tempfile.TemporaryDirectory() as folder:
        data, run = Path(folder) / "data", Path(folder) / "run"
        lock = write_synthetic_lock(data, 2 * training.global_batch_size, seq_len, vocab_size)
        smaller = f"""--architecture.num_hidden_layers 1 --architecture.swa_layers 0
            --architecture.sliding_window {seq_len // 2} --training.seq_len {seq_len} --training.steps 1
            --lr_scheduler.total_steps {training.steps} --training.mixed_precision_param float32
            --compile.no-enable --checkpoint.no-enable --checkpoint.allow_fresh_start
            --metrics.no-enable_tensorboard --metrics.no-enable_wandb --metrics.log_freq 1
            --comm.mode fake_backend"""
        command = [sys.executable, "-m", "train", "--job.config_file", str(config), *overrides]
        command += [
            *smaller.split(),
            *job_flags({"job.dump_folder": run, "mixture.lock": lock}),
        ]
        # a CPU has no float8 products
        command += ["--quantize.linear.float8.emulate"] if titan_job.model.converters else []
        world = dict.fromkeys(("NGPU", "WORLD_SIZE"), str(world_size))
        env = os.environ | world | {"LOCAL_RANK": "0", "RANK": "0"}
        outcome = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900
        )
        if outcome.returncode != 0:
            raise ValueError(
                f"the dry run of {config} failed: {(outcome.stdout + outcome.stderr)[-3000:]}"
            )
        row, attempt = (read_lines(run / name)[-1] for name in ("metrics.jsonl", "attempts.jsonl"))
    return {"world_size": attempt["world_size"], "step": row["step"], "lr": row["lr"]}


# --- the report


def show(result: Result, console: Console) -> None:
    """Print the plan: memory of a GPU at the peak, traffic it receives in a step, in bytes."""
    for phase in result["phases"]:
        console.rule(phase["job"]["config"])
        for name, figures in phase.items():
            if isinstance(figures, dict):
                show_figures(console, name, figures)
        show_rows(console, phase["data"])
    if rows := result["preparation"]["parts"]:
        console.rule("preparation, estimated")
        show_rows(console, rows)
        show_figures(console, "all", result["preparation"]["total"])
        console.print("for the recipe (tools/plan/preparation.py says what these do):\n")
        console.print(preparation.toml(rows), highlight=False, markup=False)
    show_figures(console, "all phases", result["total"])


def show_figures(console: Console, title: str, figures: Result) -> None:
    rows = [{title: name.replace("_", " "), "": value} for name, value in figures.items()]
    show_rows(console, rows)


def show_rows(console: Console, rows: list[Result]) -> None:
    if rows:
        console.print(Markdown(records(rows)))


if __name__ == "__main__":
    run_command("tools.plan", main, status=2)
