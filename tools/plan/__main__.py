"""Estimates what a training run costs, before anything runs.

    python -m tools.plan configs/phase1.toml configs/phase2.toml
    python -m tools.plan configs/phase1.toml --gpu h200 --mfu 40 --training.local_batch_size 8
    python -m tools.plan configs/phase1.toml --dry-run

Several job files are phases of one run: their tokens, days and sources add up. TorchTitan's flags follow the
job files. With --dry-run the real trainer takes one step as rank 0 of the whole world, on this machine's CPU
with a fake network (`take_step` lists what that checks). The last line of stdout is JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.markdown import Markdown

from data_mixtures import recipe, recipe_file
from data_mixtures.mixture import read_lock
from laneformer.config import LaneformerConfig
from records.files import read_lines
from records.usage import cost, money
from tools.cards import INPUTS
from tools.markdown import table
from tools.plan import preparation, sums
from tools.synthetic import write_synthetic_lock
from train.gold import gold_cost
from train.job_config import load_job

ROOT = Path(__file__).resolve().parents[2]
Result = dict[str, Any]


@dataclass
class Options:
    """Print the plan of one run, phase by phase."""

    configs: tyro.conf.Positional[tuple[Path, ...]]
    """Job files, in the order in which they run."""
    gpus: int = 192
    """GPUs of the job; must equal the size of the mesh."""
    gpus_per_node: int = 8
    """GPUs that share NVLink."""
    gpu: str = "h100"
    """GPU model, for its datasheet: h100, h200, a100, b200 or another card of tools/cards.toml."""
    tokens_per_s_per_gpu: float = 17_000
    """Expected speed; the default is the published run's."""
    mfu: float | None = None
    """Expected speed as a percentage of the GPU's dense BF16 FLOPs, in place of tokens per second."""
    network_gbit_per_s: float = 400
    """Network bandwidth of each GPU, in each direction."""
    restart_minutes: float = 10
    """Minutes from a failure to the first step of the next attempt."""
    mixture: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="TOML")] = ()
    """Mixture recipes, one a job file; default: the job's lock, or data_mixtures/NAME.toml for data/NAME/."""
    data: Path | None = None
    """Data folder whose plan.json lists the files of the sources, for `files` (python -m data_mixtures plan).
    """
    dry_run: bool = False
    """Also take one step of each job with a fake network of all GPUs."""
    json: bool = False
    """Print nothing but the JSON line."""


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    first = next(
        (i for i, a in enumerate(arguments) if a.startswith("--") and "." in a.split("=")[0]), len(arguments)
    )
    options = tyro.cli(Options, args=arguments[:first], prog="python -m tools.plan", description=__doc__)
    console = Console(quiet=options.json, width=None if sys.stdout.isatty() else 120)
    try:
        result = plan(options, arguments[first:])
    except ValueError as error:
        print(f"plan: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    show(result, console)
    print(json.dumps(result))


def plan(options: Options, overrides: list[str]) -> Result:
    """Every figure of the plan. Raises ValueError where job, mesh and GPUs do not fit each other."""
    if not options.configs:
        raise ValueError("no job file given; for example configs/phase1.toml")
    if options.mixture and len(options.mixture) != len(options.configs):
        raise ValueError(
            f"{len(options.mixture)} mixtures for {len(options.configs)} job files; give one for each"
        )
    phases: list[Result] = []
    taken: dict[str, float] = {}
    card, nic = INPUTS.card(options.gpu, *sums.DATASHEET), options.network_gbit_per_s * 1e9 / 8
    for path, mixture in zip_longest(options.configs, options.mixture):
        titan_job = load_job(["--job.config_file", str(path), *overrides])
        job = facts(titan_job, options.gpus)
        rate = (
            options.tokens_per_s_per_gpu
            if options.mfu is None
            else sums.tokens_per_s_at(options.mfu, job, card)
        )
        cluster = sums.Cluster(
            options.gpus, options.gpus_per_node, card, nic, rate, 60 * options.restart_minutes
        )
        sums.check(job, cluster)
        phase = {
            "config": str(path),
            **phase_plan(job, cluster, read_sources(path, titan_job, mixture), taken),
        }
        phase["pricing"] = {key: getattr(titan_job.metrics, key) for key in ("gpu_hour_price", "currency")}
        phase["gold"] = gold_cost(titan_job)
        phase["compute"]["cost"] = cost(phase["compute"]["gpu_hours"], phase["pricing"])
        phase["gpu_memory_bytes"], phase["usable_bytes"] = card.memory_bytes, sums.USABLE * card.memory_bytes
        if options.dry_run:
            phase["dry_run"] = take_step(path, overrides, titan_job, options.gpus)
        phases.append(phase)
    rows = preparation.parts(phases[-1]["data"], preparation.listed_files(options.data))
    data = {"parts": rows, "total": preparation.totals(rows)}
    totals = {
        key: sum(p["compute"][key] for p in phases)
        for key in ("steps", "tokens", "flops", "days", "gpu_hours")
    }
    priced = [p["compute"]["cost"] for p in phases]
    totals["cost"] = None if None in priced else sum(priced)
    hardware = {key: getattr(options, key) for key in ("gpu", "gpus", "gpus_per_node", "network_gbit_per_s")}
    return {**hardware, "phases": phases, "total": totals, "preparation": data}


def facts(titan_job: Any, gpus: int) -> sums.Job:
    from torchtitan.protocols.train_spec import get_train_spec

    from laneformer.titan.float8 import float8_of

    args: Any = get_train_spec(titan_job.model.name).model_args[titan_job.model.flavor]
    args.update_from_config(titan_job)
    training, mesh, checkpoint = titan_job.training, titan_job.parallelism, titan_job.checkpoint
    shard, replicate = mesh.data_parallel_shard_degree, mesh.data_parallel_replicate_degree
    lane_ranks = mesh.tensor_parallel_degree
    bytes_of = {"bfloat16": sums.BF16, "float32": sums.FP32}
    float8 = float8_of(titan_job)
    return sums.Job(
        config=args.config,
        seq_len=training.seq_len,
        steps=training.steps,
        global_batch=training.global_batch_size,
        local_batch=training.local_batch_size,
        shard=gpus // (replicate * lane_ranks) if shard == -1 else shard,
        replicate=replicate,
        lane_ranks=lane_ranks,
        checkpointing=titan_job.activation_checkpoint.mode,
        reshard=mesh.fsdp_reshard_after_forward != "never",
        checkpoint_interval=checkpoint.interval,
        keep_latest=checkpoint.keep_latest_k,
        keep_every=titan_job.resilience.keep_every_steps,
        param_bytes=bytes_of[training.mixed_precision_param],
        reduce_bytes=bytes_of[training.mixed_precision_reduce],
        float8=float8.recipe.name if float8 else "",
    )


def read_sources(path: Path, titan_job: Any, mixture: Path | None) -> list[Result]:
    """Name, category, weight and expected tokens (None: unknown) of each source; empty where
    no mixture is known.
    """
    lock = Path(titan_job.mixture.lock)
    if mixture is None and lock.is_file():
        locked = read_lock(lock)
        return [
            {**{k: s[k] for k in ("name", "category", "weight")}, "expected_tokens": s["windows"] * locked["seq_len"],
             "prepared": True}
            for s in locked["sources"]
        ]  # fmt: skip
    file = (
        mixture or ROOT / "data_mixtures" / f"{lock.parent.name}.toml"
    )  # data/nemotron/phase1.lock.json: nemotron
    if mixture is None and not file.is_file():
        return []
    read, phase = recipe_file.load(file), titan_job.phase.name
    if phase not in read.phases:
        raise ValueError(f"{file} has no [{phase}], the phase.name of {path}; it has {list(read.phases)}")
    expected = {s.name: s.expected_tokens_b * 1e9 for s in read.sources if s.expected_tokens_b is not None}
    files = {s.name: s.files for s in read.sources if isinstance(s, recipe.HubSource)}
    rate = preparation.tokenize_bytes(read.tokenizer)
    return [
        {"name": s.name, "category": s.category, "weight": read.phases[phase][s.name],
         "expected_tokens": expected.get(s.name), "files": files.get(s.name), "prepared": False,
         "tokenize_bytes": rate}
        for s in read.sources
    ]  # fmt: skip


def phase_plan(
    job: sums.Job, cluster: sums.Cluster, sources: list[Result], taken: dict[str, float]
) -> Result:
    """One phase; `taken`, the tokens that earlier phases took of each source, is brought up to date."""
    compute, data = sums.compute(job, cluster), []
    for source in sources:
        tokens = compute["tokens"] * source["weight"] / sum(each["weight"] for each in sources)
        so_far = taken[source["name"]] = taken.get(source["name"], 0.0) + tokens
        epochs = so_far / source["expected_tokens"] if source["expected_tokens"] else None
        data.append({**source, "tokens": tokens, "tokens_so_far": so_far, "epochs_so_far": epochs})
    return {
        "job": {
            **asdict(job),
            "config": job.config.to_dict(),
            "micro_batches": job.micro_batches,
            "mesh": job.mesh,
        },
        "tokens_per_s_per_gpu": cluster.tokens_per_s_per_gpu,
        "parameters": sums.parameters(job.config),
        "compute": compute,
        "memory": sums.memory(job),
        "largest_local_batch": sums.largest_local_batch(job, cluster.gpu),
        "checkpoints": sums.checkpoints(job, cluster),
        "data": data,
        "traffic": {
            job.mesh: sums.traffic(job, cluster, job.shard, job.replicate),
            f"flat {cluster.gpus}": sums.traffic(job, cluster, cluster.gpus // job.lane_ranks, 1),
        },
    }


def take_step(config: Path, overrides: list[str], titan_job: Any, world_size: int) -> Result:
    """One step of the real trainer as rank 0 of the whole world, in a process of its own;
    returns what was logged.

    Checked: the job file and its overrides, the mesh of all ranks, batch divisibility and the micro-batches
    that follow, how every parameter is cut (rank 0's shard), the dataloader's slice, optimizer, schedule of
    full length, one step forward and backward through FSDP. Not checked: that the collectives work and what
    they cost (a fake one moves nothing, so the loss means nothing), the GPU's memory, mixed precision,
    compile, and the layers left out: to stay within a CPU's memory and minutes, widths and lanes are the
    job's own, but there is one layer and a sequence is short. Raises ValueError with the end of its output.
    """
    layers, seq_len = 1, 16
    training = titan_job.training
    vocab_size = (
        titan_job.architecture.vocab_size or LaneformerConfig.from_flavor(titan_job.model.flavor).vocab_size
    )
    with tempfile.TemporaryDirectory() as folder:
        lock = write_synthetic_lock(
            Path(folder) / "data", 2 * training.global_batch_size, seq_len, vocab_size
        )
        run = Path(folder) / "run"
        command = [
            sys.executable, "-m", "train", "--job.config_file", str(config), *overrides,
            "--comm.mode", "fake_backend", "--job.dump_folder", str(run), "--mixture.lock", str(lock),
            "--architecture.num_hidden_layers", str(layers), "--architecture.swa_layers", "0",
            "--architecture.sliding_window", str(seq_len // 2), "--training.seq_len", str(seq_len),
            "--training.steps", "1", "--lr_scheduler.total_steps", str(training.steps),
            "--training.mixed_precision_param", "float32", "--compile.no-enable", "--checkpoint.no-enable",
            "--checkpoint.allow_fresh_start", "--metrics.no-enable_tensorboard", "--metrics.no-enable_wandb",
            "--metrics.log_freq", "1", "--validation.gold_items", "",
            *(["--quantize.linear.float8.emulate"] if titan_job.model.converters else []),
        ]  # fmt: skip
        world = dict.fromkeys(("NGPU", "WORLD_SIZE"), str(world_size))
        env = {**os.environ, **world, "LOCAL_RANK": "0", "RANK": "0"}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
        if done.returncode != 0:
            raise ValueError(f"the dry run of {config} failed: {(done.stdout + done.stderr)[-3000:]}")
        row = read_lines(run / "metrics.jsonl")[-1]
        world_size = read_lines(run / "attempts.jsonl")[-1]["world_size"]
    said = f"one step as rank 0 of {world_size}, {layers} layer, {seq_len} tokens"
    seen = {"world_size": world_size, "step": row["step"], "lr": row["lr"]}
    return {**seen, "layers": layers, "seq_len": seq_len, "said": said}


# --- the report
# --------------------------------------------------------------------------------------------------


def show(result: Result, console: Console) -> None:
    for phase in result["phases"]:
        console.rule(phase["config"])
        for each in tables(phase, result):
            show_table(console, *each)
        if "dry_run" in phase:
            console.print(f"dry run: {phase['dry_run']['said']}")
    if rows := result["preparation"]["parts"]:
        console.rule("data")
        show_table(console, *preparation.table(rows))
        console.print("for the recipe (tools/plan/preparation.py says what these do):\n")
        console.print(preparation.toml(rows), highlight=False, markup=False)
    if len(result["phases"]) > 1:
        total = result["total"]
        cost = "no price" if total["cost"] is None else f"{total['cost']:,.0f}"
        sizes = (f"{total[key]:.4g}" for key in ("tokens", "flops"))
        row = [*sizes, f"{total['days']:.1f}", f"{total['gpu_hours']:,.0f}", cost]
        show_table(console, "all phases", ["tokens", "FLOPs", "days", "GPU-hours", "cost"], [row])


def show_table(console: Console, title: str, columns: list[str], rows: list[list[str]]) -> None:
    console.print(title, Markdown(table(columns, rows)))


def tables(phase: Result, result: Result) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """(title, columns, rows) of the tables of one phase."""
    parts, c, job, saved, g = (phase[k] for k in ("parameters", "compute", "job", "checkpoints", "gold"))
    rows = [[name, f"{count:,}", f"{100 * count / parts['total']:.1f}%"] for name, count in parts.items()]
    yield "parameters", ["part", "count", "share"], rows
    yield "compute", ["", ""], [
        ["batch", f"{job['global_batch']} sequences x {job['seq_len']} = {c['tokens_per_step']:,} tokens a step"],
        ["mesh", f"{job['mesh']} GPUs" + (", the last ones by lane" if job["lane_ranks"] > 1 else "")],
        ["micro-batches", f"{job['micro_batches']} of {job['local_batch']} sequences a GPU"],
        ["tokens", f"{c['steps']:,} steps = {c['tokens']:.4g}"],
        ["FLOPs", f"{c['flops_per_token'] / 1e9:.2f}e9 a token (causal and windowed keys only) = {c['flops']:.4g}"],
        ["speed", f"{phase['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU = {c['mfu_percent']:.1f}% of {result['gpu']}"],
        ["time", f"{c['step_s']:.3f} s a step, {c['days']:.2f} days = {c['gpu_hours']:,.0f} GPU-hours"],
        ["gold bits per byte", f"{g['items']:,} items a validation = {g['share']:.2%} of all" if g else "none"],
        ["cost", money(c["gpu_hours"], phase["pricing"]) or "set metrics.gpu_hour_price"],
    ]  # fmt: skip
    yield memory_table(phase, result["gpu"])
    lost = f"{saved['hours_lost_per_failure']:.2f} h = {saved['gpu_hours_lost_per_failure']:.0f} GPU-hours"
    yield "checkpoints", ["", ""], [
        ["one, with optimizer", gb(saved["bytes"])],
        ["every", f"{job['checkpoint_interval']} steps = {saved['every_s'] / 60:.1f} min"],
        ["written in all", f"{saved['written']:,} = {saved['bytes_written'] / 1e12:,.1f} TB"],
        ["kept at most", gb(saved["bytes_kept"])],
        ["lost per failure, on average", lost],
    ]  # fmt: skip
    yield traffic_table(phase, result["network_gbit_per_s"])
    if phase["data"]:
        yield data_table(phase["data"])


def gb(value: float) -> str:
    return f"{value / 1e9:,.2f} GB"


def traffic_table(phase: Result, gbit_per_s: float) -> tuple[str, list[str], list[list[str]]]:
    """Title, columns and rows of what `sums.traffic` says of some meshes."""
    meshes, step_s = phase["traffic"].values(), phase["compute"]["step_s"]
    names = (
        "lanes_bytes",
        "all_gather_bytes",
        "reduce_scatter_bytes",
        "all_reduce_bytes",
        "nic_bytes",
        "nic_bytes_worst",
    )
    rows = [[n.removesuffix("_bytes").replace("_", " "), *(gb(mesh[n]) for mesh in meshes)] for n in names]
    rows.insert(
        1, ["of one layer in a micro-batch", *(gb(mesh["lanes_of_a_layer_bytes"]) for mesh in meshes)]
    )
    for key, label in (
        ("lanes_s", "sums of lanes over NVLink"),
        ("nvlink_s", "shards over NVLink"),
        ("nic_s", "over the network"),
        ("nic_s_worst", "at worst"),
    ):
        cells = [f"{1e3 * mesh[key]:.0f} ms, {100 * mesh[key] / step_s:.0f}%" for mesh in meshes]
        rows.append([f"{label}, of a step", *cells])
    rows.append(["ranks in the longest ring", *(str(mesh["ring_ranks"]) for mesh in meshes)])
    title = f"received by a GPU in a step ({gbit_per_s:g} Gb/s a GPU), before any overlap"
    return title, ["mesh", *phase["traffic"]], rows


def memory_table(phase: Result, gpu: str) -> tuple[str, list[str], list[list[str]]]:
    m = phase["memory"]
    parts = ("weights", "moments", "gradients", "gathered", "kept_activations", "working_set", "total")
    rows = [[n.replace("_", " "), gb(m[n]), f"{100 * m[n] / phase['gpu_memory_bytes']:.0f}%"] for n in parts]
    fits = "fits" if m["total"] <= phase["usable_bytes"] else "DOES NOT FIT"
    rows.append([f"usable of one {gpu}", gb(phase["usable_bytes"]), fits])
    rows.append(["largest local batch that fits", str(phase["largest_local_batch"]), ""])
    rows.append(["(logits in float32, were they whole)", gb(m["logits_whole_fp32"]), "never made"])
    return "memory per GPU at the peak (activations are an estimate)", ["", "bytes", "of the GPU"], rows


def data_table(data: list[Result]) -> tuple[str, list[str], list[list[str]]]:
    def count(value: float | None, unit: float = 1e9) -> str:
        return "?" if value is None else f"{value / unit:,.2f}"

    weights, tokens = (sum(source[key] for source in data) for key in ("weight", "tokens"))
    rows = [
        [s["name"], s["category"], f"{100 * s['weight'] / weights:.2f}%", count(s["tokens"]),
         count(s["expected_tokens"]), count(s["epochs_so_far"], 1)]
        for s in data
    ]  # fmt: skip
    rows.append(["all", "", "100%", count(tokens), f"{tokens * sums.SHARD_TOKEN_BYTES / 1e12:.2f} TB", ""])
    return "data", ["source", "category", "weight", "needed, 1e9", "expected, 1e9", "epochs so far"], rows


if __name__ == "__main__":
    main()
