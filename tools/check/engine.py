"""Is the decode engine right? Modules, logits, greedy tokens and bits against PyTorch;
planted faults must fail.

    python -m tools.check.engine runs/demo/hf        python -m tools.check.engine tiny

The reference is model.py in float64. How far float32 may be from it is not guessed: Transformers' float32
forward on the same weights shows it, and the engine, which sums in another order, gets four times its largest
error. The same gate must refuse an engine with one fault in it, else it proves nothing; and the modules' own
outputs (modules.py) must name the module where the fault sits. A flavor gets random weights of unit gain, so
that every module matters.

    S positions   V vocabulary
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table

from laneformer import Engine, LaneformerConfig
from laneformer.config import FLAVORS
from laneformer.engine.folder import read_checkpoint
from laneformer.hf.modeling_laneformer import LaneformerForCausalLM
from records.files import code_version
from tools.check.reference import (
    BLOCK,
    Weights,
    chosen_positions,
    first_difference,
    hf_greedy,
    hf_logits,
    hf_model,
    mean_kl,
    model_outputs,
    module_report,
    plain_model,
    planted_faults,
    random_prompts,
    random_weights,
    relative_errors,
    tensors_of,
    weights_of,
)

ROOT = Path(__file__).resolve().parents[2]
MARGIN = 4.0  # another order of summation changes a rounding error's value, hardly its size
FAULT_POSITIONS = 48
REPEATED_POSITIONS = 24
BF16_POSITIONS = (
    256  # PyTorch's bf16 is very slow on a CPU without such instructions; this many give the mean
)


@dataclass
class Options:
    """Check the engine; a table, and the last line of stdout is JSON. Exit status 1 when a check fails."""

    model: Annotated[str, tyro.conf.Positional]
    """A Hugging Face folder (the Llama family's, too), or a flavor (2b, 300m, tiny) with random bf16 weights.
    """
    prompts: int = 8
    """Prompts whose greedy continuation is compared token for token."""
    new_tokens: int = 32
    """Length of those continuations."""
    runs: int = 100
    """Repeated runs for each number of threads, which must agree to the last bit."""
    threads: tuple[int, ...] = (1, 2, 3)
    """Numbers of threads that must give the same bits."""
    math: Literal["exact", "bf16"] = "exact"
    """The engine's arithmetic; with bf16 the allowed error is that of Transformers in bf16."""
    json: bool = False
    """Print nothing but the JSON line."""


def main(arguments: list[str] | None = None) -> None:
    def measure(options: Options, console: Console) -> dict[str, Any]:
        return check(*load(options.model), options, console)

    run(
        "check_engine",
        Options,
        __doc__,
        measure,
        lambda report: [module_table(report["modules"]), table(report)],
        arguments,
    )


def run(
    name: str, options_type: Any, about: str | None, measure: Callable[[Any, Console], dict[str, Any]],
    tables: Callable[[dict[str, Any]], list[Table]], arguments: list[str] | None,
) -> NoReturn:  # fmt: skip
    """A check as a command: tables on stderr, one JSON line on stdout; `measure` returns
    what `passed` and figures.
    """
    prog, started = f"python -m tools.check {name.removeprefix('check_')}", time.monotonic()
    options = tyro.cli(options_type, args=arguments, prog=prog, description=about)
    console = Console(stderr=True, quiet=options.json, width=None if sys.stderr.isatty() else 120)
    try:
        report = measure(options, console)
    except ValueError as error:
        print(f"{name}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    report["code_version"], report["seconds"] = code_version(ROOT), round(time.monotonic() - started, 1)
    for shown in tables(report):
        console.print(shown)
    console.print(
        "[green]all checks hold[/]" if report["ok"] else f"[red]failed: {', '.join(report['failed'])}[/]"
    )
    print(json.dumps(report))
    raise SystemExit(not report["ok"])


def verdict(passed: dict[str, bool]) -> dict[str, Any]:
    failed = [name for name, held in passed.items() if not held]
    return {"passed": passed, "failed": failed, "ok": not failed}


def load(name: str) -> tuple[LaneformerConfig, Weights]:
    """Config and weights of a folder, or of a flavor with random weights."""
    if name in FLAVORS:
        config = LaneformerConfig.from_flavor(name)
        return config, random_weights(config)
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{name!r} is neither a folder with config.json nor a flavor; flavors: {sorted(FLAVORS)}"
        )
    checkpoint = read_checkpoint(folder)
    return checkpoint.config, weights_of(checkpoint.tensors)


@dataclass
class Reference:
    """PyTorch's results on the ids: float64 logits and module outputs, Transformers' model,
    and the allowed errors.
    """

    ids: list[int]
    positions: list[int]
    logits: np.ndarray
    outputs: np.ndarray
    single: np.ndarray
    single_model: LaneformerForCausalLM
    errors: dict[str, np.ndarray]  # of Transformers, per position
    half_kl: float
    allowed: float
    tie: float  # closer logits may come in either order


def reference_of(config: LaneformerConfig, weights: Weights, options: Options, console: Console) -> Reference:
    """Run the float64 model and Transformers in bf16 and float32 on ids that reach a block past the window."""
    windows = [config.window(i) or 0 for i in range(config.num_hidden_layers)]
    length = min(config.max_position_embeddings, 8 + max(windows) + BLOCK)
    positions = chosen_positions(config, length)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, length).tolist()
    console.print(f"float64 reference on {length} positions", style="dim")
    logits, outputs = model_outputs(plain_model(config, weights), ids, positions)
    console.print("Transformers in bf16 and float32", style="dim")
    half = hf_logits(hf_model(config, weights, torch.bfloat16), ids[:BF16_POSITIONS])
    single_model = hf_model(config, weights, torch.float32)
    single = hf_logits(single_model, ids)
    errors, worst = {}, {}
    for name, logits_of in (("hf_fp32", single), ("hf_bf16", half)):
        expected = logits[: len(logits_of)]
        errors[name], worst[name] = (
            relative_errors(logits_of, expected),
            float(np.abs(logits_of - expected).max()),
        )
    factor, yardstick = (MARGIN, "hf_fp32") if options.math == "exact" else (1.0, "hf_bf16")
    tie = 2 * (factor * worst[yardstick] + worst["hf_fp32"])
    allowed, half_kl = float(factor * errors[yardstick].max()), mean_kl(single[: len(half)], half)
    return Reference(ids, positions, logits, outputs, single, single_model, errors, half_kl, allowed, tie)


def check(config: LaneformerConfig, weights: Weights, options: Options, console: Console) -> dict[str, Any]:
    """Every check on one model; returns the report that main prints, with `ok` and the
    names of what `failed`.
    """
    truth = reference_of(config, weights, options, console)
    console.print("the engine", style="dim")
    with engine_of(config, weights, options) as engine:
        isa, logits = engine.isa, engine.logits(truth.ids)
        partials = engine._partials(truth.ids, truth.positions)
        modules = module_report(config, partials, truth.outputs, truth.positions, options.math)
        greedy = compare_greedy(engine, truth.single_model, options, truth.tie)
    errors = truth.errors | {"engine": relative_errors(logits, truth.logits)}
    kl = {"engine": mean_kl(truth.single, logits), "hf_bf16": truth.half_kl}
    console.print(f"{options.runs} repeated runs each on {options.threads} threads", style="dim")
    differing = differing_runs(config, weights, truth.ids[:REPEATED_POSITIONS], options)
    faults, found = measure_faults(config, weights, truth, options, console)
    passed = {
        "modules": modules["first_wrong"] is None,
        "relative error": bool(errors["engine"].max() <= truth.allowed),
        "KL": kl["engine"] <= kl["hf_bf16"],
        "greedy tokens": greedy["unexplained"] == 0,
        "repeated runs": differing == 0,
        **{f"refuses: {name}": error > truth.allowed for name, error in faults.items()},
        **{f"locates: {name}": where["planted_in"] == where["first_wrong"] for name, where in found.items()},
    }
    length = len(truth.ids)
    by_depth = {
        d: {who: float(e[d - 1]) for who, e in errors.items() if d <= len(e)} for d in depths(config, length)
    }
    return {
        "model": options.model, "math": options.math, "isa": isa,
        "positions": length, "allowed": truth.allowed, "relative_error": by_depth,
        "relative_error_max": {who: float(error.max()) for who, error in errors.items()},
        "modules": modules, "located": found, "kl": kl, "greedy": greedy,
        "runs": options.runs, "threads": list(options.threads),
        "differing_runs": differing, "faults": faults, **verdict(passed),
    }  # fmt: skip


def measure_faults(
    config: LaneformerConfig, weights: Weights, truth: Reference, options: Options, console: Console
) -> tuple[dict[str, float], dict[str, Any]]:
    """By planted fault: the engine's largest relative error, and where the fault is and was first seen."""
    faults, found = {}, {}
    ids, near = (
        truth.ids[:FAULT_POSITIONS],
        [position for position in truth.positions if position < FAULT_POSITIONS],
    )
    for name, planted_in, wrong_config, wrong_weights in planted_faults(config, weights):
        console.print(f"planted: {name}", style="dim")
        with engine_of(wrong_config, wrong_weights, options) as engine:
            wrong, partials = engine.logits(ids), engine._partials(ids, near)
        faults[name] = float(relative_errors(wrong, truth.logits[:FAULT_POSITIONS]).max())
        seen = module_report(config, partials, truth.outputs[: len(near)], near, options.math)["first_wrong"]
        found[name] = {"planted_in": planted_in, "first_wrong": seen}
    return faults, found


def engine_of(
    config: LaneformerConfig, weights: Weights, options: Options, threads: int | None = None
) -> Engine:
    return Engine(config, tensors_of(weights), threads=threads, math=options.math, kv_dtype="fp32")


def depths(config: LaneformerConfig, length: int) -> list[int]:
    """Positions to show: the first ones, and those around the edge of each window."""
    edges = {config.window(i) for i in range(config.num_hidden_layers)} - {None}
    wanted = {1, 2, 11, length} | {edge + step for edge in edges if edge for step in (-1, 0, 1, 17)}
    return sorted(d for d in wanted if 1 <= d <= length)


def compare_greedy(
    engine: Engine, model: LaneformerForCausalLM, options: Options, tie: float
) -> dict[str, Any]:
    """Continuations of random prompts, short ones and some beyond the window; where they part,
    and by what lead.
    """
    config, parted, leads = engine.config, [], []
    lengths = (1, 5, 11, min(config.sliding_window + 3, 200))
    for index, prompt in enumerate(random_prompts(config, options.prompts, lengths, options.new_tokens)):
        ours = engine.generate(prompt, max_new_tokens=options.new_tokens, ignore_eos=True)
        theirs, lead = hf_greedy(model, prompt, len(ours))
        leads.append(min(lead))
        if (first := first_difference(ours, theirs)) is not None:
            parted.append({"prompt": index, "token": first, "lead": lead[first]})
    return {
        "prompts": options.prompts, "new_tokens": options.new_tokens, "same": options.prompts - len(parted),
        "parted": parted, "tie": tie, "smallest_lead": min(leads, default=None),
        "unexplained": sum(p["lead"] > tie for p in parted),
    }  # fmt: skip


def differing_runs(config: LaneformerConfig, weights: Weights, ids: list[int], options: Options) -> int:
    """How many repeated runs, over all numbers of threads, differ in a bit from the
    first: logits, sampled tokens.
    """
    first: tuple[bytes, list[int]] | None = None
    differing = 0
    for threads in options.threads:
        with engine_of(config, weights, options, threads) as engine:
            for _ in range(options.runs):
                sampled = engine.generate(ids[:3], max_new_tokens=4, temperature=1.0, ignore_eos=True)
                found = engine.logits(ids).tobytes(), sampled
                first = first or found
                differing += found != first
    return differing


def table(report: dict[str, Any]) -> Table:
    shown = Table(title=f"{report['model']}: engine ({report['isa']}, math {report['math']}) against PyTorch")
    for column in ("", "engine", "HF float32", "HF bf16", "allowed", ""):
        shown.add_column(column, justify="right" if column else "left")
    rows = {f"logits at depth {d}": row for d, row in report["relative_error"].items()}
    rows["logits, worst of all depths"] = report["relative_error_max"]
    for name, row in rows.items():
        cells = [f"{row[who]:.2e}" if who in row else "" for who in ("engine", "hf_fp32", "hf_bf16")]
        shown.add_row(name, *cells, f"{report['allowed']:.2e}", mark(row["engine"] <= report["allowed"]))
    kl, greedy, passed = report["kl"], report["greedy"], report["passed"]
    shown.add_section()
    limit = f"{kl['hf_bf16']:.2e}"
    shown.add_row("KL against HF float32, nats", f"{kl['engine']:.2e}", "0", limit, limit, mark(passed["KL"]))
    same = f"{greedy['same']} of {greedy['prompts']}"
    shown.add_row("greedy continuations alike", same, "", "", "", mark(passed["greedy tokens"]))
    for p in greedy["parted"]:
        lead = f"lead {p['lead']:.2e}"
        shown.add_row(
            f"  prompt {p['prompt']} parts at {p['token']}", lead, "", "", f"{greedy['tie']:.2e}", ""
        )
    runs = f"{report['differing_runs']} of {report['runs'] * len(report['threads'])}"
    shown.add_row(
        f"runs that differ, threads {report['threads']}", runs, "", "", "0", mark(passed["repeated runs"])
    )
    shown.add_section()
    for name, error in report["faults"].items():
        refused = mark(passed[f"refuses: {name}"])
        shown.add_row(f"planted: {name}", f"{error:.2e}", "", "", f"> {report['allowed']:.2e}", refused)
        where = report["located"][name]
        shown.add_row(
            f"  first wrong module {where['first_wrong']}", "", "", "", "", mark(passed[f"locates: {name}"])
        )
    return shown


def mark(held: bool) -> str:
    return "[green]ok[/]" if held else "[red]FAILED[/]"


def module_table(report: dict[str, Any]) -> Table:
    shown = Table(title="modules' partial outputs against float64, worst of layers and lanes")
    for column in ("depth", "module", "relative error", "cosine", "of allowed", "in layer"):
        shown.add_column(column, justify="left" if column == "module" else "right")
    for row in report["by_depth"]:
        shown.add_row(
            str(row["depth"]), row["module"], f"{row['relative_error']:.2e}", f"1 - {1 - row['cosine']:.1e}",
            f"{row['of_allowed']:.1%}", str(row["layer"]),
        )  # fmt: skip
    return shown


if __name__ == "__main__":
    main()
