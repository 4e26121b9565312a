"""Run a check as a command: the options, models, gates and greedy tokens that checks share."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.markdown import Markdown

from laneformer import Engine, LaneformerConfig
from laneformer.config import FLAVORS
from laneformer.engine.folder import read_checkpoint
from laneformer.hf.modeling_laneformer import LaneformerForCausalLM
from records.command import Count, check_ranges, run_command
from records.files import code_version, write_atomically
from tools import ROOT
from tools.check.reference import (
    Weights,
    compare_greedy,
    hf_greedy,
    random_prompts,
    random_weights,
    weights_of,
)
from tools.markdown import records

# figure, what is allowed, and whether the check holds; None: not measured here
Gate = tuple[Any, Any, bool | None]
# another order of summation changes a rounding error's value, hardly its size
MARGIN = 4.0


@dataclass
class ModelOptions:
    model: Annotated[str, tyro.conf.Positional]
    """Hugging Face folder (also of the Llama family) or GGUF file.
    For `engine` also a flavor (2b, 300m, tiny) with random bf16 weights.
    """
    prompts: Count = 8
    """Prompts whose greedy continuation is compared token for token."""
    new_tokens: Count = 32
    """Length of those continuations."""
    json: bool = False
    """Print nothing but the JSON line."""
    out: Path | None = None
    """File for the verdict and the tables."""


def run_check(
    name: str,
    options_class: type[Any],
    measure: Callable[[Any, Console], dict[str, Any]],
    arguments: Sequence[str] | None,
) -> None:
    """Run a check as a command: tables on stderr, JSON last on stdout, exit status 1 on failure.

    Args:
        options_class: a dataclass, with `json` to print nothing else and `out` for a table file.
        measure: returns `verdict` and its figures; `title` and `tables` (rows by title) are only
            printed.
    """

    def run() -> None:
        options = tyro.cli(options_class, args=arguments, prog=f"python -m tools.check {name}")
        check_ranges(options_class, vars(options))
        console = Console(
            stderr=True, quiet=options.json, width=None if sys.stderr.isatty() else 120
        )
        started = time.monotonic()
        report = measure(options, console)
        report |= {
            "code_version": code_version(ROOT),
            "seconds": round(time.monotonic() - started, 1),
        }
        text = write_page(report.pop("title", ""), report.pop("tables", {}), report)
        console.print(Markdown(text))
        print(json.dumps(report))
        if options.out is not None:
            write_atomically(options.out, text)
        raise SystemExit(not report["ok"])

    # 1 is the status of a check that fails
    run_command(name, run, status=2)


def write_page(title: str, tables: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    words = "all checks hold" if report["ok"] else f"FAILED: {', '.join(report['failed'])}"
    parts = [f"# {title or report['model']}: {words}"]
    parts.append(f"Code {report['code_version']}, {report['seconds']:.0f} s.")
    for name, rows in {**tables, "Checks": report["gates"]}.items():
        parts.append(f"{name}:\n\n{records(rows)}")
    return "\n\n".join(parts) + "\n"


def load(name: str, dtype: str = "auto") -> tuple[LaneformerConfig, Weights]:
    """Return config and weights of a folder or GGUF file, or of a flavor with random weights."""
    if name in FLAVORS:
        config = LaneformerConfig.from_flavor(name)
        return config, random_weights(config)
    if not Path(name).exists():
        raise ValueError(
            f"{name!r} is neither a folder with config.json nor a flavor; flavors: {sorted(FLAVORS)}"
        )
    checkpoint = read_checkpoint(Path(name), dtype=dtype)
    return checkpoint.config, weights_of(checkpoint.tensors)


def at_most(figure: Any, allowed: Any) -> Gate:
    # NaN never is
    return figure, allowed, figure <= allowed


def equal(figure: Any, expected: Any) -> Gate:
    return figure, expected, figure == expected


def verdict(gates: Mapping[str, Gate]) -> dict[str, Any]:
    """Return `ok`, the names of what `failed`, and a row for each gate."""
    rows = [
        {
            "check": name,
            "figure": figure,
            "allowed": allowed,
            "holds": None if holds is None else bool(holds),
        }
        for name, (figure, allowed, holds) in gates.items()
    ]
    failed = [row["check"] for row in rows if row["holds"] is False]
    return {"failed": failed, "ok": not failed, "gates": rows}


def check_greedy(
    engine: Engine, model: LaneformerForCausalLM, options: ModelOptions, tie: float
) -> dict[str, Any]:
    """Compare continuations of random prompts, short ones and some beyond the window."""
    new_tokens, lengths = options.new_tokens, (1, 5, 11, min(engine.config.sliding_window + 3, 200))
    comparison = compare_greedy(
        random_prompts(engine.config, options.prompts, lengths, new_tokens),
        lambda prompt: engine.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True),
        lambda prompt, count: hf_greedy(model, prompt, count),
        lambda prompt: tie,
    )
    return {**comparison, "new_tokens": new_tokens, "tie": tie}
