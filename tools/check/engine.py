"""Is the decode engine right? Modules, logits, greedy tokens and bits against PyTorch;
planted faults must fail.

    python -m tools.check engine runs/demo/hf        python -m tools.check engine tiny

The reference is model.py in float64. How far float32 may be from it is not guessed: Transformers' float32
forward on the same weights shows it, and the engine, which sums in another order, gets four times its largest
error. The same gate must refuse an engine with one fault in it, else it proves nothing; and the modules' own
outputs must name the module where the fault sits. A flavor gets random weights of unit gain, so
that every module matters.

    S positions   V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from rich.console import Console

from laneformer import Engine, LaneformerConfig
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


def main(arguments: list[str] | None = None) -> None:
    run_check(
        "engine",
        Options,
        lambda options, console: check(*load(options.model), options, console),
        arguments,
    )


class Truth(NamedTuple):
    """Float64 logits (S, V) after `ids`, and the modules' outputs (P, N, 2, L, D) at `positions`."""

    ids: list[int]
    positions: list[int]
    logits: np.ndarray
    outputs: np.ndarray


def check(
    config: LaneformerConfig, weights: Weights, options: Options, console: Console
) -> dict[str, Any]:
    """Every check on one model; returns the report that main prints, with `ok` and the names of what `failed`, and
    `tables` of rows by title.
    """
    length = length_beyond_windows(config, 8 + BLOCK)
    positions = chosen_positions(config, length)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, length).tolist()
    console.print(f"float64 reference on {length} positions", style="dim")
    truth = Truth(ids, positions, *model_outputs(plain_model(config, weights), ids, positions))
    console.print("Transformers in bf16 and float32", style="dim")
    single_model = hf_model(config, weights, torch.float32)
    half = hf_logits(hf_model(config, weights, torch.bfloat16), ids[:BF16_POSITIONS])
    logits = {"hf_fp32": hf_logits(single_model, ids), "hf_bf16": half}
    farthest = {
        name: float(np.abs(each - truth.logits[: len(each)]).max()) for name, each in logits.items()
    }
    factor, yardstick = (MARGIN, "hf_fp32") if options.math == "exact" else (1.0, "hf_bf16")
    tie = 2 * (factor * farthest[yardstick] + farthest["hf_fp32"])
    console.print("the engine", style="dim")
    with engine_of(config, weights, options) as engine:
        logits["engine"], partials = engine.logits(ids), engine._partials(ids, positions)
        greedy = check_greedy(engine, single_model, options, tie)
    modules = module_report(config, partials, truth.outputs, positions, options.math)
    errors = {
        name: relative_errors(each, truth.logits[: len(each)]) for name, each in logits.items()
    }
    worst = {name: float(error.max()) for name, error in errors.items()}
    allowed = factor * worst[yardstick]
    kl = {
        name: mean_kl(logits["hf_fp32"][: len(logits[name])], logits[name])
        for name in ("engine", "hf_bf16")
    }
    console.print(f"{options.runs} repeated runs each on {options.threads} threads", style="dim")
    differing = differing_runs(config, weights, ids[:REPEATED_POSITIONS], options)
    faults, fault_gates = plant_faults(config, weights, truth, options, allowed)
    gates = {
        "modules": (modules["of_allowed"], 1.0, modules["first_wrong"] is None),
        "relative error": (worst["engine"], allowed, worst["engine"] <= allowed),
        "KL": (kl["engine"], kl["hf_bf16"], kl["engine"] <= kl["hf_bf16"]),
        "greedy tokens": (greedy["unexplained"], 0, greedy["unexplained"] == 0),
        "repeated runs": (differing, 0, differing == 0),
        **fault_gates,
    }
    by_depth: dict[Any, dict[str, float]] = {
        p + 1: {name: error[p] for name, error in errors.items() if p < len(error)}
        for p in positions
    }
    rows = [
        {"depth": depth, **{name: row.get(name) for name in errors}}
        for depth, row in {**by_depth, "worst": worst}.items()
    ]
    tables = {
        "Modules' partial outputs against float64, worst of layers and lanes": modules["by_depth"],
        "Relative error of the logits": rows,
    }
    if greedy["diverged"]:
        tables["Greedy continuations that part; a lead below the tie explains it"] = greedy[
            "diverged"
        ]
    return {
        "model": options.model,
        "math": options.math,
        "positions": length,
        "allowed": allowed,
        "relative_error": by_depth,
        "relative_error_max": worst,
        "modules": modules,
        "kl": kl,
        "greedy": greedy,
        "runs": options.runs,
        "threads": list(options.threads),
        "differing_runs": differing,
        "faults": faults,
        "tables": tables,
        **verdict(gates),
    }


def plant_faults(
    config: LaneformerConfig, weights: Weights, truth: Truth, options: Options, allowed: float
) -> tuple[dict[str, float], dict[str, Any]]:
    """The engine's largest relative error by planted fault, and gates: it is refused, and located where it is."""
    faults, gates, ids = dict[str, float](), dict[str, Any](), truth.ids[:FAULT_POSITIONS]
    near = [position for position in truth.positions if position < FAULT_POSITIONS]
    for name, planted_in, wrong_config, wrong_weights in planted_faults(config, weights):
        with engine_of(wrong_config, wrong_weights, options) as engine:
            wrong, partials = engine.logits(ids), engine._partials(ids, near)
        faults[name] = error = float(relative_errors(wrong, truth.logits[:FAULT_POSITIONS]).max())
        located = module_report(config, partials, truth.outputs[: len(near)], near, options.math)[
            "first_wrong"
        ]
        gates[f"refuses: {name}"] = error, allowed, error > allowed
        gates[f"locates: {name}"] = located, planted_in, located == planted_in
    return faults, gates


def engine_of(
    config: LaneformerConfig, weights: Weights, options: Options, threads: int | None = None
) -> Engine:
    return Engine(config, tensors_of(weights), threads=threads, math=options.math, kv_dtype="fp32")


def differing_runs(
    config: LaneformerConfig, weights: Weights, ids: list[int], options: Options
) -> int:
    """How many repeated runs, over all numbers of threads, differ in a bit from the
    first: logits, sampled tokens.
    """
    first: tuple[bytes, list[int]] | None = None
    differing = 0
    for threads in options.threads:
        with engine_of(config, weights, options, threads) as engine:
            for _ in range(options.runs):
                sampled = engine.generate(
                    ids[:3], max_new_tokens=4, temperature=1.0, ignore_eos=True
                )
                result = engine.logits(ids).tobytes(), sampled
                first = first or result
                differing += result != first
    return differing


if __name__ == "__main__":
    main()
