"""Is the decode engine right? Its logits, probabilities, greedy tokens and bits against PyTorch; planted faults must fail.

    python -m tools.check_engine runs/demo/hf        python -m tools.check_engine tiny

The reference is model.py in float64. How far float32 may be from it is not guessed: Transformers' float32 forward on the
same weights shows it, and the engine, which sums in another order, gets four times its largest error. The same gate must
refuse an engine with one fault in it, else it proves nothing. A flavor gets random weights of unit gain, so that every
module matters to the logits.

    S positions   V vocabulary
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table

from laneformer import Engine, Laneformer, LaneformerConfig
from laneformer.config import FLAVORS
from laneformer.engine.checkpoint import Tensor
from laneformer.hf.configuration_laneformer import FIELDS, LaneformerHFConfig
from laneformer.hf.modeling_laneformer import LaneformerForCausalLM
from laneformer.provenance import code_version
from tools.import_hf import read_weights

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
MARGIN = 4.0  # another order of summation changes a rounding error's value, hardly its size
FAULT_POSITIONS = 48
REPEATED_POSITIONS = 24
Weights = dict[str, torch.Tensor]


@dataclass
class Options:
    """Check the engine; a table, and the last line of stdout is JSON. Exit status 1 when a check fails."""

    model: Annotated[str, tyro.conf.Positional]
    """A Hugging Face folder, or a flavor (2b, 300m, tiny) with random bf16 weights."""
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
    options = tyro.cli(Options, args=arguments, description=__doc__)
    console = Console(stderr=True, quiet=options.json)
    try:
        config, weights = load(options.model)
        report = check(config, weights, options, console)
    except ValueError as error:
        print(f"check_engine: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    console.print(table(report))
    console.print("[green]all checks hold[/]" if report["ok"] else f"[red]failed: {', '.join(report['failed'])}[/]")
    print(json.dumps(report))
    raise SystemExit(not report["ok"])


def load(name: str) -> tuple[LaneformerConfig, Weights]:
    """Config and weights of a folder, or of a flavor with random weights."""
    if name in FLAVORS:
        config = LaneformerConfig.from_flavor(name)
        return config, random_weights(config)
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{name!r} is neither a folder with config.json nor a flavor; flavors: {sorted(FLAVORS)}")
    values = json.loads((folder / "config.json").read_text())
    config = LaneformerConfig.from_dict({key: value for key, value in values.items() if key in FIELDS})
    return config, read_weights(folder, config)


def random_weights(config: LaneformerConfig, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Weights:
    """Matrices that keep the size of what goes through them, norm scales around one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Laneformer(config).state_dict().items()}
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        gain = 1.0 if name.startswith("tok_embeddings") else shape[-1] ** -0.5
        weights[name] = (1 + 0.2 * noise if name.endswith("norm.weight") else gain * noise).to(dtype)
    return weights


def check(config: LaneformerConfig, weights: Weights, options: Options, console: Console) -> dict[str, Any]:
    """Every check on one model; the report that main prints, with `ok` and the names of what `failed`."""
    started = time.monotonic()
    length = min(config.max_position_embeddings, 40 + max((config.window(i) or 0 for i in range(layers(config)))))
    ids = np.random.default_rng(0).integers(0, config.vocab_size, length).tolist()
    with console.status(f"float64 reference on {length} positions"):
        reference = plain_logits(config, weights, ids)
    with console.status("Transformers in bf16 and float32"):
        half = hf_logits(hf_model(config, weights, torch.bfloat16), ids)
        single_model = hf_model(config, weights, torch.float32)
        single = hf_logits(single_model, ids)
    errors = {"hf_fp32": relative_errors(single, reference), "hf_bf16": relative_errors(half, reference)}
    allowed = float(MARGIN * errors["hf_fp32"].max() if options.math == "exact" else errors["hf_bf16"].max())

    with console.status("the engine"), engine_of(config, weights, options) as engine:
        logits = engine.logits(ids)
        errors["engine"] = relative_errors(logits, reference)
        # a tie of two logits may fall either way within this much
        tie = 2 * float(np.abs(logits - reference).max() + np.abs(single - reference).max())
        greedy = compare_greedy(engine, single_model, options, tie)
    kl = {"engine": mean_kl(single, logits), "hf_bf16": mean_kl(single, half)}
    with console.status(f"{options.runs} repeated runs on {options.threads} threads"):
        differing = differing_runs(config, weights, ids[:REPEATED_POSITIONS], options)
    with console.status("planted faults"):
        faults = {
            name: fault_error(config, planted, ids, reference, options)
            for name, planted in planted_faults(config, weights)
        }
    passed = {
        "relative error": bool(errors["engine"].max() <= allowed),
        "KL": kl["engine"] <= kl["hf_bf16"],
        "greedy tokens": all(p["margin"] <= tie for p in greedy["parted"]),
        "repeated runs": differing == 0,
        **{f"refuses: {name}": error > allowed for name, error in faults.items()},
    }
    failed = [name for name, held in passed.items() if not held]
    rows = {d: {who: float(error[d - 1]) for who, error in errors.items()} for d in depths(config, length)}
    return {
        "model": options.model, "code_version": code_version(Path(__file__).parent), "math": options.math,
        "isa": engine_isa(config, weights, options), "positions": length, "relative_error_allowed": allowed,
        "relative_error_max": {who: float(error.max()) for who, error in errors.items()}, "relative_error": rows,
        "kl": kl, "greedy": greedy, "runs": options.runs, "threads": list(options.threads),
        "differing_runs": differing, "faults": faults, "passed": passed, "failed": failed, "ok": not failed,
        "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip
