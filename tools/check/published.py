"""Check that the engine, our modeling code and a model's published code compute the same.

    python -m tools.check published FOLDER --trust-remote-code
    python -m tools.check published model.gguf

The reference is model.py in float64; each may err by four times the largest error of our modeling
code in float32. The published code is the folder's own (only with --trust-remote-code) or, for the
Llama family, Transformers'.

    S positions   V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from laneformer import Engine
from laneformer.engine.text_files import read_json
from records.command import Count
from tools.check.gates import (
    MARGIN,
    ModelOptions,
    at_most,
    check_greedy,
    load,
    run_check,
    verdict,
)
from tools.check.reference import (
    hf_model,
    plain_model,
    random_ids,
    relative_errors,
)


@dataclass
class Options(ModelOptions):
    """Compare engine, modeling code and published code. Exit status 1 when they differ."""

    positions: Count = 128
    """Length of the compared text."""
    trust_remote_code: bool = False
    """Run the Python code in the folder."""


def check(options: Options, console: Console) -> dict[str, Any]:
    """Return errors of engine, modeling code and published code, with `ok` and `failed`."""
    path = Path(options.model)
    config, weights = load(options.model, "fp32")
    length = min(options.positions, config.max_position_embeddings)
    # random ids: every matrix and every row of the embedding matters alike
    ids = random_ids(config, length)
    console.print(f"model.py in float64 on {length} positions", style="dim")
    exact = compute_logits(plain_model(config, weights), ids)
    # a borrowed layer is in model.py alone
    single = (
        plain_model(config, weights, torch.float32)
        if config.extensions()
        else hf_model(config, weights, torch.float32)
    )
    logits, published = {"modeling code": compute_logits(single, ids)}, load_published(options)
    if published is not None:
        console.print(f"the published code: {type(published).__name__}", style="dim")
        logits["published code"] = compute_logits(published, ids)
    # a lead below the errors of both sides may go either way
    tie = 2 * (MARGIN + 1) * float(np.abs(logits["modeling code"] - exact).max())
    console.print("the engine", style="dim")
    # a GGUF file's weights as they are
    dtype = "fp32" if path.is_file() else "auto"
    with Engine.from_pretrained(path, device="cpu", dtype=dtype, cache=False) as engine:
        logits["engine"] = engine.logits(ids)
        greedy = check_greedy(engine, published, options, tie) if published is not None else {}
    errors = {side: float(relative_errors(values, exact).max()) for side, values in logits.items()}
    allowed = MARGIN * errors["modeling code"]
    gates: dict[str, Any] = {
        f"logits: {side}": at_most(error, allowed) for side, error in errors.items()
    }
    gates["greedy tokens"] = greedy.get("unexplained"), 0, not greedy.get("unexplained")
    return {
        "model": options.model,
        "greedy": greedy,
        "published_code": None if published is None else type(published).__name__,
        **verdict(gates),
    }


def load_published(options: Options) -> Any:
    """Return Transformers' model in float32; None if the folder's own code may not run."""
    from transformers import AutoModelForCausalLM

    folder, arguments = (
        Path(options.model),
        dict[str, Any](trust_remote_code=options.trust_remote_code),
    )
    if folder.is_file():
        folder, arguments = folder.parent, {"gguf_file": folder.name}
    elif "auto_map" in read_json(folder / "config.json") and not options.trust_remote_code:
        return None
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **arguments).eval()
    except Exception as error:
        # of whatever kind the folder's code raises
        raise ValueError(f"the published code of {options.model} does not load: {error}") from error


@torch.no_grad()
def compute_logits(model: Any, ids: list[int]) -> np.ndarray:
    """Return logits (S, V)."""
    out = model(torch.tensor([ids]))
    return (out if isinstance(out, torch.Tensor) else out.logits)[0].numpy()


def main(arguments: list[str] | None = None) -> None:
    run_check("published", Options, check, arguments)


if __name__ == "__main__":
    main()
