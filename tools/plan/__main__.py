"""Estimates what a training run costs, before anything runs.

    python -m tools.plan configs/phase1.toml configs/phase2.toml
    python -m tools.plan configs/phase1.toml --gpu h200 --mfu 40 --training.local_batch_size 8
    python -m tools.plan configs/phase1.toml --dry-run

Several job files are phases of one run: their tokens, days and sources add up. TorchTitan's flags follow the job files.
With --dry-run the real trainer takes one step as rank 0 of the whole world, on this machine's CPU with a fake network
(tools/plan/dry_run.py lists what that checks). The last line of stdout is JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from data_mixtures import recipe
from data_mixtures.mixture import read_lock
from tools.plan import sums
from tools.plan.dry_run import dry_run
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
    gpu: Literal["h100", "h200", "a100"] = "h100"
    """GPU model, for its datasheet figures."""
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
    dry_run: bool = False
    """Also take one step of each job with a fake network of all GPUs."""
    json: bool = False
    """Print nothing but the JSON line."""
    overrides: tyro.conf.Suppress[tuple[str, ...]] = field(default=())


def main(arguments: list[str] | None = None) -> None:
    ours, overrides = split_arguments(sys.argv[1:] if arguments is None else arguments)
    options = tyro.cli(Options, args=ours, description=__doc__)
    options.overrides = tuple(overrides)
    console = Console(quiet=options.json, width=None if sys.stdout.isatty() else 120)
    try:
        result = plan(options)
    except ValueError as error:
        print(f"plan: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    show(result, console)
    print(json.dumps(result))


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(our arguments, TorchTitan's): TorchTitan's begin with the first `--section.key`."""
    first = next((i for i, a in enumerate(arguments) if a.startswith("--") and "." in a.split("=")[0]), len(arguments))
    return arguments[:first], arguments[first:]


def plan(options: Options) -> Result:
    """Every figure of the plan. Raises ValueError where job, mesh and GPUs do not fit each other."""
    if not options.configs:
        raise ValueError("no job file given; for example configs/phase1.toml")
    if options.mixture and len(options.mixture) != len(options.configs):
        raise ValueError(f"{len(options.mixture)} mixtures for {len(options.configs)} job files; give one for each")
    phases: list[Result] = []
    taken: dict[str, float] = {}
    for index, path in enumerate(options.configs):
        titan_job = load_job(["--job.config_file", str(path), *options.overrides])
        job = facts(titan_job, options.gpus)
        gpu = sums.GPUS[options.gpu]
        rate = options.tokens_per_s_per_gpu
        if options.mfu is not None:
            rate = sums.tokens_per_s_at(options.mfu, job, gpu)
        nic = options.network_gbit_per_s * 1e9 / 8
        cluster = sums.Cluster(options.gpus, options.gpus_per_node, gpu, nic, rate, 60 * options.restart_minutes)
        sums.check(job, cluster)
        sources = read_sources(path, titan_job, options.mixture[index] if options.mixture else None)
        phase = {"config": str(path), **phase_plan(job, cluster, sources, taken)}
        phase["gpu_memory_bytes"], phase["usable_bytes"] = gpu.memory_bytes, sums.USABLE * gpu.memory_bytes
        if options.dry_run:
            phase["dry_run"] = dry_run(path, options.overrides, titan_job, options.gpus)
        phases.append(phase)
    totals = {key: sum(p["compute"][key] for p in phases) for key in ("steps", "tokens", "flops", "days", "gpu_hours")}
    return {
        "gpu": options.gpu,
        "gpus": options.gpus,
        "gpus_per_node": options.gpus_per_node,
        "network_gbit_per_s": options.network_gbit_per_s,
        "phases": phases,
        "total": totals,
    }


def facts(titan_job: Any, gpus: int) -> sums.Job:
    from torchtitan.protocols.train_spec import get_train_spec

    args: Any = get_train_spec(titan_job.model.name).model_args[titan_job.model.flavor]
    args.update_from_config(titan_job)
    mesh, checkpoint = titan_job.parallelism, titan_job.checkpoint
    replicate = mesh.data_parallel_replicate_degree
    shard = gpus // replicate if mesh.data_parallel_shard_degree == -1 else mesh.data_parallel_shard_degree
    bytes_of = {"bfloat16": sums.BF16, "float32": sums.FP32}
    return sums.Job(
        config=args.config,
        seq_len=titan_job.training.seq_len,
        steps=titan_job.training.steps,
        global_batch=titan_job.training.global_batch_size,
        local_batch=titan_job.training.local_batch_size,
        shard=shard,
        replicate=replicate,
        checkpointing=titan_job.activation_checkpoint.mode,
        reshard=mesh.fsdp_reshard_after_forward != "never",
        checkpoint_interval=checkpoint.interval,
        keep_latest=checkpoint.keep_latest_k,
        keep_every=getattr(getattr(titan_job, "resilience", None), "keep_every_steps", 0),
        param_bytes=bytes_of[titan_job.training.mixed_precision_param],
        reduce_bytes=bytes_of[titan_job.training.mixed_precision_reduce],
    )


def read_sources(path: Path, titan_job: Any, mixture: Path | None) -> list[Result]:
    """Name, category, weight and expected tokens (None: unknown) of each source; empty where no mixture is known."""
    lock = Path(titan_job.mixture.lock)
    beside = ROOT / "data_mixtures" / f"{lock.parent.name}.toml"  # data/nemotron/phase1.lock.json: nemotron.toml
    if mixture is None and lock.is_file():
        locked = read_lock(lock)
        return [
            {**{k: s[k] for k in ("name", "category", "weight")}, "expected_tokens": s["windows"] * locked["seq_len"]}
            for s in locked["sources"]
        ]
    if mixture is None and not beside.is_file():
        return []
    read = recipe.load(mixture or beside)
    phase = titan_job.phase.name
    if phase not in read.phases:
        raise ValueError(f"{mixture or beside} has no [{phase}], the phase.name of {path}; it has {list(read.phases)}")
    expected = {s.name: s.expected_tokens_b * 1e9 for s in read.sources if isinstance(s, recipe.HubSource)}
    return [
        {"name": s.name, "category": s.category, "weight": read.phases[phase][s.name],
         "expected_tokens": expected.get(s.name)}
        for s in read.sources
    ]  # fmt: skip


def phase_plan(job: sums.Job, cluster: sums.Cluster, sources: list[Result], taken: dict[str, float]) -> Result:
    """One phase; `taken`, the tokens that earlier phases took of each source, is brought up to date."""
    compute = sums.compute(job, cluster)
    weights = {source["name"]: source["weight"] for source in sources}
    here = sums.data_needed(int(compute["tokens"]), weights, {}) if sources else {}
    taken.update(sums.data_needed(int(compute["tokens"]), weights, taken) if sources else {})
    data = [
        {**source, "tokens": here[source["name"]], "tokens_so_far": taken[source["name"]],
         "epochs_so_far": taken[source["name"]] / source["expected_tokens"] if source["expected_tokens"] else None}
        for source in sources
    ]  # fmt: skip
    return {
        "job": {**asdict(job), "config": job.config.to_dict(), "micro_batches": job.micro_batches},
        "tokens_per_s_per_gpu": cluster.tokens_per_s_per_gpu,
        "parameters": sums.parameters(job.config),
        "compute": compute,
        "memory": sums.memory(job),
        "largest_local_batch": sums.largest_local_batch(job, cluster.gpu),
        "checkpoints": sums.checkpoints(job, cluster),
        "data": data,
        "traffic": {
            f"{job.replicate} x {job.shard}": sums.traffic(job, cluster, job.shard, job.replicate),
            f"flat {cluster.gpus}": sums.traffic(job, cluster, cluster.gpus, 1),
        },
    }


# --- the report --------------------------------------------------------------------------------------------------


def table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    made = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        made.add_column(column, justify="right" if i else "left")
    for row in rows:
        made.add_row(*row)
    return made


def gb(value: float) -> str:
    return f"{value / 1e9:,.2f} GB"


def show(result: Result, console: Console) -> None:
    for phase in result["phases"]:
        console.rule(phase["config"])
        for made in (parameter_table(phase), compute_table(phase, result), memory_table(phase, result),
                     checkpoint_table(phase), traffic_table(phase, result)):  # fmt: skip
            console.print(made)
        if phase["data"]:
            console.print(data_table(phase))
        if "dry_run" in phase:
            console.print(f"dry run: {phase['dry_run']['said']}")
    if len(result["phases"]) > 1:
        total = result["total"]
        rows = [
            [f"{total['tokens']:.4g}", f"{total['flops']:.4g}", f"{total['days']:.1f}", f"{total['gpu_hours']:,.0f}"]
        ]
        console.print(table("all phases", ["tokens", "FLOPs", "days", "GPU-hours"], rows))


def parameter_table(phase: Result) -> Table:
    total = phase["parameters"]["total"]
    rows = [[name, f"{count:,}", f"{100 * count / total:.1f}%"] for name, count in phase["parameters"].items()]
    return table("parameters", ["part", "count", "share"], rows)


def compute_table(phase: Result, result: Result) -> Table:
    c, job = phase["compute"], phase["job"]
    rows = [
        ["batch", f"{job['global_batch']} sequences x {job['seq_len']} = {c['tokens_per_step']:,} tokens a step"],
        ["mesh", f"{job['replicate']} x {job['shard']} GPUs"],
        ["micro-batches", f"{job['micro_batches']} of {job['local_batch']} sequences a GPU"],
        ["tokens", f"{c['steps']:,} steps = {c['tokens']:.4g}"],
        ["FLOPs", f"{c['flops_per_token'] / 1e9:.2f}e9 a token (causal and windowed keys only) = {c['flops']:.4g}"],
        ["speed", f"{phase['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU = {c['mfu_percent']:.1f}% of {result['gpu']}"],
        ["time", f"{c['step_s']:.3f} s a step, {c['days']:.2f} days = {c['gpu_hours']:,.0f} GPU-hours"],
    ]  # fmt: skip
    return table("compute", ["", ""], rows)


def memory_table(phase: Result, result: Result) -> Table:
    m = phase["memory"]
    parts = ("weights", "moments", "gradients", "gathered", "kept_activations", "working_set", "total")
    rows = [
        [name.replace("_", " "), gb(m[name]), f"{100 * m[name] / phase['gpu_memory_bytes']:.0f}%"] for name in parts
    ]
    fits = m["total"] <= phase["usable_bytes"]
    said = "fits" if fits else "DOES NOT FIT"
    rows.append([f"usable of one {result['gpu']}", gb(phase["usable_bytes"]), said])
    rows.append(["largest local batch that fits", str(phase["largest_local_batch"]), ""])
    rows.append(["(logits in float32, were they whole)", gb(m["logits_whole_fp32"]), "never made"])
    return table("memory per GPU at the peak (activations are an estimate)", ["", "bytes", "of the GPU"], rows)


def checkpoint_table(phase: Result) -> Table:
    c = phase["checkpoints"]
    rows = [
        ["one, with optimizer", gb(c["bytes"])],
        ["every", f"{phase['job']['checkpoint_interval']} steps = {c['every_s'] / 60:.1f} min"],
        ["written in all", f"{c['written']:,} = {c['bytes_written'] / 1e12:,.1f} TB"],
        ["kept at most", gb(c["bytes_kept"])],
        ["lost per failure, on average", f"{c['hours_lost_per_failure']:.2f} h = "
         f"{c['gpu_hours_lost_per_failure']:.0f} GPU-hours"],
    ]  # fmt: skip
    return table("checkpoints", ["", ""], rows)


def traffic_table(phase: Result, result: Result) -> Table:
    step_s = phase["compute"]["step_s"]
    names = ("all_gather_bytes", "reduce_scatter_bytes", "all_reduce_bytes", "nic_bytes", "nic_bytes_worst")
    rows = [[name.removesuffix("_bytes").replace("_", " "), *(gb(t[name]) for t in phase["traffic"].values())]
            for name in names]  # fmt: skip
    for key, label in (("nvlink_s", "over NVLink"), ("nic_s", "over the network"), ("nic_s_worst", "at worst")):
        cells = [f"{1e3 * t[key]:.0f} ms, {100 * t[key] / step_s:.0f}%" for t in phase["traffic"].values()]
        rows.append([f"{label}, of a step", *cells])
    rows.append(["ranks in the longest ring", *(str(t["ring_ranks"]) for t in phase["traffic"].values())])
    title = f"received by a GPU in a step ({result['network_gbit_per_s']:g} Gb/s a GPU), before any overlap"
    return table(title, ["mesh", *phase["traffic"]], rows)


def data_table(phase: Result) -> Table:
    def count(tokens: float | None) -> str:
        return "?" if tokens is None else f"{tokens / 1e9:,.2f}"

    total = sum(source["weight"] for source in phase["data"])
    rows = []
    for s in phase["data"]:
        epochs = "?" if s["epochs_so_far"] is None else f"{s['epochs_so_far']:.2f}"
        rows.append([s["name"], s["category"], f"{100 * s['weight'] / total:.2f}%", count(s["tokens"]),
                     count(s["expected_tokens"]), epochs])  # fmt: skip
    tokens = sum(s["tokens"] for s in phase["data"])
    rows.append(["all", "", "100%", count(tokens), f"{tokens * sums.SHARD_TOKEN_BYTES / 1e12:.2f} TB", ""])
    return table("data", ["source", "category", "weight", "needed, 1e9", "expected, 1e9", "epochs so far"], rows)


if __name__ == "__main__":
    main()
