"""Is the decode engine right? Modules, logits, greedy tokens and bits against PyTorch;
planted faults must fail.

    python -m tools.check engine runs/demo/hf        python -m tools.check engine tiny

The reference is model.py in float64. How far float32 may be from it is not guessed: Transformers' float32
forward on the same weights shows it, and the engine, which sums in another order, gets four times its largest
error. The same gate must refuse an engine with one fault in it, else it proves nothing; and the modules' own
outputs (modules.py) must name the module where the fault sits. A flavor gets random weights of unit gain, so
that every module matters.

    S positions   V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console

from laneformer import Engine, LaneformerConfig
from laneformer.hf.modeling_laneformer import LaneformerForCausalLM
from tools.check.gates import MARGIN, ModelOptions, check_greedy, load, run_check, verdict
from tools.check.reference import (
    BLOCK,
    Weights,
    chosen_positions,
    hf_logits,
    hf_model,
    length_beyond_windows,
    mean_kl,
    model_outputs,
    module_report,
    plain_model,
    planted_faults,
    relative_errors,
    tensors_of,
)

FAULT_POSITIONS = 48
REPEATED_POSITIONS = 24
# PyTorch's bf16 is very slow on a CPU without such instructions; this many give the mean
BF16_POSITIONS = 256


@dataclass
class Options(ModelOptions):
    """Check the engine; tables, and the last line of stdout is JSON. Exit status 1 when a check fails."""

    runs: int = 100
    """Repeated runs for each number of threads, which must agree to the last bit."""
    threads: tuple[int, ...] = (1, 2, 3)
    """Numbers of threads that must give the same bits."""
    math: Literal["exact", "bf16"] = "exact"
    """The engine's arithmetic; with bf16 the allowed error is that of Transformers in bf16."""


def measure(options: Options, console: Console) -> dict[str, Any]:
    return check(*load(options.model), options, console)


def main(arguments: list[str] | None = None) -> None:
    run_check("engine", Options, measure, arguments)


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
    length = length_beyond_windows(config, 8 + BLOCK)
    positions = chosen_positions(config, length)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, length).tolist()
    console.print(f"float64 reference on {length} positions", style="dim")
    logits, outputs = model_outputs(plain_model(config, weights), ids, positions)
    console.print("Transformers in bf16 and float32", style="dim")
    half = hf_logits(hf_model(config, weights, torch.bfloat16), ids[:BF16_POSITIONS])
    single_model = hf_model(config, weights, torch.float32)
    single = hf_logits(single_model, ids)
    errors, worst = {}, {}
    for name, found in (("hf_fp32", single), ("hf_bf16", half)):
        expected = logits[: len(found)]
        errors[name], worst[name] = relative_errors(found, expected), float(np.abs(found - expected).max())
    factor, yardstick = (MARGIN, "hf_fp32") if options.math == "exact" else (1.0, "hf_bf16")
    tie = 2 * (factor * worst[yardstick] + worst["hf_fp32"])
    allowed, half_kl = float(factor * errors[yardstick].max()), mean_kl(single[: len(half)], half)
    return Reference(ids, positions, logits, outputs, single, single_model, errors, half_kl, allowed, tie)


def check(config: LaneformerConfig, weights: Weights, options: Options, console: Console) -> dict[str, Any]:
    """Every check on one model; returns the report that main prints, with `ok` and the
    names of what `failed`, and `tables` of rows by title.
    """
    truth = reference_of(config, weights, options, console)
    console.print("the engine", style="dim")
    with engine_of(config, weights, options) as engine:
        isa, logits = engine.isa, engine.logits(truth.ids)
        partials = engine._partials(truth.ids, truth.positions)
        modules = module_report(config, partials, truth.outputs, truth.positions, options.math)
        greedy = check_greedy(engine, truth.single_model, options, truth.tie)
    errors = truth.errors | {"engine": relative_errors(logits, truth.logits)}
    kl = {"engine": mean_kl(truth.single, logits), "hf_bf16": truth.half_kl}
    console.print(f"{options.runs} repeated runs each on {options.threads} threads", style="dim")
    differing = differing_runs(config, weights, truth.ids[:REPEATED_POSITIONS], options)
    faults, found = measure_faults(config, weights, truth, options, console)
    worst = {who: float(error.max()) for who, error in errors.items()}
    gates = {
        "modules": (modules["of_allowed"], 1.0, modules["first_wrong"] is None),
        "relative error": (worst["engine"], truth.allowed, worst["engine"] <= truth.allowed),
        "KL": (kl["engine"], kl["hf_bf16"], kl["engine"] <= kl["hf_bf16"]),
        "greedy tokens": (greedy["unexplained"], 0, greedy["unexplained"] == 0),
        "repeated runs": (differing, 0, differing == 0),
        **{f"refuses: {name}": (error, truth.allowed, error > truth.allowed) for name, error in faults.items()},
        **{f"locates: {name}": (*where.values(), where["planted_in"] == where["first_wrong"])
           for name, where in found.items()},
    }  # fmt: skip
    by_depth: dict[Any, dict[str, float]] = {
        p + 1: {who: float(error[p]) for who, error in errors.items() if p < len(error)}
        for p in truth.positions
    }
    tables = {
        "Modules' partial outputs against float64, worst of layers and lanes": modules["by_depth"],
        "Relative error of the logits": [
            {"depth": d, **{who: row.get(who) for who in errors}} for d, row in {**by_depth, "worst": worst}.items()
        ],
    }  # fmt: skip
    if greedy["diverged"]:
        tables["Greedy continuations that part; a lead below the tie explains it"] = greedy["diverged"]
    return {
        "model": options.model, "math": options.math, "isa": isa,
        "positions": len(truth.ids), "allowed": truth.allowed, "relative_error": by_depth, "relative_error_max": worst,
        "modules": modules, "located": found, "kl": kl, "greedy": greedy,
        "runs": options.runs, "threads": list(options.threads),
        "differing_runs": differing, "faults": faults, "tables": tables, **verdict(gates),
    }  # fmt: skip


def measure_faults(
    config: LaneformerConfig, weights: Weights, truth: Reference, options: Options, console: Console
) -> tuple[dict[str, float], dict[str, Any]]:
    """By planted fault: the engine's largest relative error, and where the fault is and was first seen."""
    faults, found, ids = {}, {}, truth.ids[:FAULT_POSITIONS]
    near = [position for position in truth.positions if position < FAULT_POSITIONS]
    for name, planted_in, wrong_config, wrong_weights in planted_faults(config, weights):
        console.print(f"planted: {name}", style="dim")
        with engine_of(wrong_config, wrong_weights, options) as engine:
            wrong, partials = engine.logits(ids), engine._partials(ids, near)
        faults[name] = float(relative_errors(wrong, truth.logits[:FAULT_POSITIONS]).max())
        seen = module_report(config, partials, truth.outputs[: len(near)], near, options.math)["first_wrong"]
        found[name] = {"first_wrong": seen, "planted_in": planted_in}
    return faults, found


def engine_of(
    config: LaneformerConfig, weights: Weights, options: Options, threads: int | None = None
) -> Engine:
    return Engine(config, tensors_of(weights), threads=threads, math=options.math, kv_dtype="fp32")


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


if __name__ == "__main__":
    main()
