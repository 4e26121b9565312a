"""What the checks of the CPU engine share: options, models, gates, greedy continuations, the command."""

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
from records.files import code_version, write_atomically
from tools.check.reference import (
    Weights,
    compare_greedy,
    hf_greedy,
    random_prompts,
    random_weights,
    weights_of,
)
from tools.markdown import records

ROOT = Path(__file__).resolve().parents[2]
MARGIN = 4.0  # another order of summation changes a rounding error's value, hardly its size


@dataclass
class ModelOptions:
    """Options of every check of a model."""

    model: Annotated[str, tyro.conf.Positional]
    """A Hugging Face folder (the Llama family's, too) or a GGUF file; for `engine` also a flavor (2b, 300m, tiny)
    with random bf16 weights.
    """
    prompts: int = 8
    """Prompts whose greedy continuation is compared token for token."""
    new_tokens: int = 32
    """Length of those continuations."""
    json: bool = False
    """Print nothing but the JSON line."""


def run_check(
    name: str,
    options_class: type[Any],
    measure: Callable[[Any, Console], dict[str, Any]],
    arguments: Sequence[str] | None,
    page: Callable[[Any, dict[str, Any]], str] | None = None,
) -> None:
    """A check as a command: tables on stderr, JSON as the last line of stdout, exit status 1 if a gate fails.

    measure: returns `verdict` and its figures; `tables` of rows by title are printed alone. page: writes what is
    printed, in place of the tables, and left in options.out.
    """
    started = time.monotonic()
    options = tyro.cli(options_class, args=arguments, prog=f"python -m tools.check {name}")
    quiet = page is None and options.json
    console = Console(stderr=True, quiet=quiet, width=None if sys.stderr.isatty() else 120)
    try:
        report = measure(options, console)
    except ValueError as error:
        print(f"{name}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    report["code_version"], report["seconds"] = (
        code_version(ROOT),
        round(time.monotonic() - started, 1),
    )
    if page is not None:
        text = page(options, report)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(options.out, text)
    else:
        tables = {**report.pop("tables", {}), "Checks": report["gates"]}
        text = "\n\n".join(f"{title}:\n\n{records(rows)}" for title, rows in tables.items())
        text += "\n\n" + (
            "all checks hold" if report["ok"] else f"FAILED: {', '.join(report['failed'])}"
        )
    console.print(Markdown(text))
    print(json.dumps(report))
    raise SystemExit(not report["ok"])


def load(name: str, dtype: str = "auto") -> tuple[LaneformerConfig, Weights]:
    """Config and weights of a folder or GGUF file, or of a flavor with random weights."""
    if name in FLAVORS:
        config = LaneformerConfig.from_flavor(name)
        return config, random_weights(config)
    if not Path(name).exists():
        raise ValueError(
            f"{name!r} is neither a folder with config.json nor a flavor; flavors: {sorted(FLAVORS)}"
        )
    checkpoint = read_checkpoint(Path(name), dtype=dtype)
    return checkpoint.config, weights_of(checkpoint.tensors)


def verdict(gates: Mapping[str, tuple[Any, Any, bool]]) -> dict[str, Any]:
    """`gates`: by check the figure, what is allowed, and whether the check holds."""
    rows = [
        {"check": name, "figure": figure, "allowed": allowed, "holds": bool(held)}
        for name, (figure, allowed, held) in gates.items()
    ]
    passed = {row["check"]: row["holds"] for row in rows}
    failed = [name for name, held in passed.items() if not held]
    return {"passed": passed, "failed": failed, "ok": not failed, "gates": rows}


def check_greedy(
    engine: Engine, model: LaneformerForCausalLM, options: ModelOptions, tie: float
) -> dict[str, Any]:
    """Continuations of random prompts, short ones and some beyond the window."""
    new_tokens, lengths = options.new_tokens, (1, 5, 11, min(engine.config.sliding_window + 3, 200))
    comparison = compare_greedy(
        random_prompts(engine.config, options.prompts, lengths, new_tokens),
        lambda prompt: engine.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True),
        lambda prompt, count: hf_greedy(model, prompt, count),
        lambda prompt: tie,
    )
    return {**comparison, "new_tokens": new_tokens, "tie": tie}
