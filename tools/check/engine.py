"""Check the decode engine's modules, logits, greedy tokens and bits against PyTorch.

    python -m tools.check engine runs/demo/hf        python -m tools.check engine tiny

The reference is model.py in float64; the engine may err by four times Transformers' float32 error.

    S positions   V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from rich.console import Console

from laneformer import Engine, LaneformerConfig
from records.command import Count
from tools.check.gates import (
    MARGIN,
    ModelOptions,
    at_most,
    check_greedy,
    equal,
    load,
    run_check,
    verdict,
)
from tools.check.reference import (
    BLOCK,
    Weights,
    choose_positions,
    hf_logits,
    hf_model,
    length_beyond_windows,
    make_faults,
    mean_kl,
    model_outputs,
    module_report,
    plain_model,
    random_ids,
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

    runs: Count = 100
    """Repeated runs for each number of threads, which must agree to the last bit."""
    threads: tuple[Count, ...] = (1, 2, 3)
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
    """Float64 logits (S, V) after `ids`, and module outputs (P, N, 2, L, D) at `positions`."""

    ids: list[int]
    positions: list[int]
    logits: np.ndarray
    outputs: np.ndarray

    def distance(self, logits: np.ndarray) -> float:
        """Return the largest error of a logit over the first positions."""
        return float(np.abs(logits - self.logits[: len(logits)]).max())


def compute_truth(config: LaneformerConfig, weights: Weights) -> Truth:
    length = length_beyond_windows(config, 8 + BLOCK)
    positions = choose_positions(config, length)
    ids = random_ids(config, length)
    return Truth(ids, positions, *model_outputs(plain_model(config, weights), ids, positions))


def check(
    config: LaneformerConfig, weights: Weights, options: Options, console: Console
) -> dict[str, Any]:
    """Run every check on one model; return the report with `ok`, `failed` and `tables`."""
    console.print("float64 reference, Transformers in bf16 and float32", style="dim")
    truth = compute_truth(config, weights)
    ids, positions = truth.ids, truth.positions
    single_model = hf_model(config, weights, torch.float32)
    half = hf_logits(hf_model(config, weights, torch.bfloat16), ids[:BF16_POSITIONS])
    logits = {"hf_fp32": hf_logits(single_model, ids), "hf_bf16": half}
    exact = options.math == "exact"
    factor, yardstick = (MARGIN, "hf_fp32") if exact else (1.0, "hf_bf16")
    # a lead below the errors of both sides may go either way
    tie = 2 * (factor * truth.distance(logits[yardstick]) + truth.distance(logits["hf_fp32"]))
    console.print("the engine", style="dim")
    with engine_of(config, weights, options) as engine:
        logits["engine"], partials = engine.logits(ids), engine._partials(ids, positions)
        greedy = check_greedy(engine, single_model, options, tie)
    modules = module_report(config, partials, truth.outputs, positions, options.math)
    errors = {
        name: relative_errors(values, truth.logits[: len(values)])
        for name, values in logits.items()
    }
    worst = {name: float(error.max()) for name, error in errors.items()}
    allowed = factor * worst[yardstick]
    kl, kl_bf16 = (
        mean_kl(logits["hf_fp32"][: len(values)], values) for values in (logits["engine"], half)
    )
    console.print(f"{options.runs} repeated runs each on {options.threads} threads", style="dim")
    differing = count_differing_runs(config, weights, ids[:REPEATED_POSITIONS], options)
    # the gate must refuse an engine with one planted fault, and module outputs must locate it
    faults, fault_gates = plant_faults(config, weights, truth, options, allowed)
    gates = {
        "modules": at_most(modules["of_allowed"], 1.0),
        "relative error": at_most(worst["engine"], allowed),
        "KL": at_most(kl, kl_bf16),
        "greedy tokens": equal(greedy["unexplained"], 0),
        "repeated runs": equal(differing, 0),
        **fault_gates,
    }
    by_depth = [
        {"depth": p + 1, **{name: error[p] for name, error in errors.items() if p < len(error)}}
        for p in positions
    ]
    return {
        "model": options.model,
        "math": options.math,
        "relative_error": by_depth,
        "relative_error_max": worst,
        "modules": modules,
        "greedy": greedy,
        "faults": faults,
        "tables": list_tables(modules, by_depth, worst, greedy),
        **verdict(gates),
    }


def list_tables(
    modules: dict[str, Any],
    by_depth: list[dict[str, Any]],
    worst: dict[str, float],
    greedy: dict[str, Any],
) -> dict[str, list[dict[str, Any]]]:
    columns = ("depth", *worst)
    rows = [{name: row.get(name) for name in columns} for row in by_depth]
    tables = {
        "Modules' partial outputs against float64, worst of layers and lanes": modules["by_depth"],
        "Relative error of the logits": [*rows, {"depth": "worst", **worst}],
    }
    if greedy["diverged"]:
        title = "Greedy continuations that part; a lead below the tie explains it"
        tables[title] = greedy["diverged"]
    return tables


def plant_faults(
    config: LaneformerConfig, weights: Weights, truth: Truth, options: Options, allowed: float
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the largest relative error by planted fault, and gates: refused, and located."""
    faults, gates, ids = dict[str, float](), dict[str, Any](), truth.ids[:FAULT_POSITIONS]
    nearest = [position for position in truth.positions if position < FAULT_POSITIONS]
    for name, planted_in, wrong_config, wrong_weights in make_faults(config, weights):
        with engine_of(wrong_config, wrong_weights, options) as engine:
            wrong, partials = engine.logits(ids), engine._partials(ids, nearest)
        faults[name] = error = float(relative_errors(wrong, truth.logits[:FAULT_POSITIONS]).max())
        located = module_report(
            config, partials, truth.outputs[: len(nearest)], nearest, options.math
        )["first_wrong"]
        gates[f"refuses: {name}"] = error, allowed, error > allowed
        gates[f"locates: {name}"] = equal(located, planted_in)
    return faults, gates


def engine_of(
    config: LaneformerConfig, weights: Weights, options: Options, threads: int | None = None
) -> Engine:
    # keys and values in float32, as the reference has them
    return Engine(config, tensors_of(weights), threads=threads, math=options.math, kv_dtype="fp32")


def count_differing_runs(
    config: LaneformerConfig, weights: Weights, ids: list[int], options: Options
) -> int:
    """Count repeated runs, over all numbers of threads, that differ in a bit from the first."""
    first: tuple[bytes, list[int]] | None = None
    differing = 0
    for threads in options.threads:
        with engine_of(config, weights, options, threads) as engine:
            for _ in range(options.runs):
                # logits and sampled tokens
                sampled = engine.generate(
                    ids[:3], max_new_tokens=4, temperature=1.0, ignore_eos=True
                )
                result = engine.logits(ids).tobytes(), sampled
                # over all numbers of threads: they must not decide the order of a sum
                first = first or result
                differing += result != first
    return differing


if __name__ == "__main__":
    main()
