"""Does a model compute the same in the engine, in our modeling code, and in the code that
it was published with?

    python -m tools.check published FOLDER --trust-remote-code
    python -m tools.check published model.gguf

The reference is model.py in float64 on the weights as the engine reads them. Our modeling code in float32 shows what
rounding costs; everybody gets four times its largest error, for the logits and for the stream after each layer, so the
first layer beyond that is where a difference begins. The published code is the folder's own (it runs only with
--trust-remote-code) or, for models of the Llama family, Transformers'.

    S positions   V vocabulary   N layers   L lanes   D hidden
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
from tools.check.gates import MARGIN, ModelOptions, check_greedy, load, run_check, verdict
from tools.check.reference import hf_model, hooked, output_errors, plain_model, relative_errors


@dataclass
class Options(ModelOptions):
    """Compare engine, modeling code and published code. Exit status 1 when they differ."""

    positions: int = 128
    """Length of the compared text."""
    trust_remote_code: bool = False
    """Run the Python code in the folder."""


def check(options: Options, console: Console) -> dict[str, Any]:
    """Errors of engine, modeling code and published code, with `ok` and the names of what `failed`."""
    path = Path(options.model)
    config, weights = load(options.model, "fp32")
    length = min(options.positions, config.max_position_embeddings)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, length).tolist()
    console.print(f"model.py in float64 on {length} positions", style="dim")
    logits, streams = outputs(plain_model(config, weights), ids)
    single = (
        plain_model(config, weights).float()
        if config.borrowed()
        else hf_model(config, weights, torch.float32)
    )
    models, published = {"modeling code": single}, published_model(options)
    if published is not None:
        console.print(f"the published code: {type(published).__name__}", style="dim")
        models["published code"] = published
    results = {who: outputs(model, ids) for who, model in models.items()}
    errors = {
        who: float(relative_errors(theirs, logits).max()) for who, (theirs, _) in results.items()
    }
    layers = {
        who: output_errors(theirs, streams).max((1, 2)) for who, (_, theirs) in results.items()
    }
    tie = 2 * (MARGIN + 1) * float(np.abs(results["modeling code"][0] - logits).max())
    console.print("the engine", style="dim")
    dtype = "fp32" if path.is_file() else "auto"  # a GGUF file's weights as they are
    with Engine.from_pretrained(path, device="cpu", dtype=dtype, cache=False) as engine:
        errors["engine"] = float(relative_errors(engine.logits(ids), logits).max())
        greedy = check_greedy(engine, published, options, tie) if published is not None else {}
    allowed = MARGIN * errors["modeling code"]
    within = layers.get("published code", 0) <= MARGIN * np.maximum.accumulate(
        layers["modeling code"]
    )
    first_wrong = next(iter(np.flatnonzero(~within).tolist()), None)
    gates: dict[str, Any] = {
        f"logits: {who}": (error, allowed, error <= allowed) for who, error in errors.items()
    }
    gates["layers: published code"] = first_wrong, "no first difference", first_wrong is None
    gates["greedy tokens"] = greedy.get("unexplained"), 0, not greedy.get("unexplained")
    return {
        "model": options.model,
        "positions": length,
        "allowed": allowed,
        "relative_error": errors,
        "layers": {who: errors_of.tolist() for who, errors_of in layers.items()},
        "first_wrong": first_wrong,
        "greedy": greedy,
        "published_code": None if published is None else type(published).__name__,
        **verdict(gates),
    }


def published_model(options: Options) -> Any:
    """Transformers' model in float32; None where that is the folder's own code, which may not run."""
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
    except Exception as error:  # of whatever kind the folder's code raises
        raise ValueError(f"the published code of {options.model} does not load: {error}") from error


def outputs(model: Any, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits (S, V) and the streams after each layer (N, S, L, D), L = 1 where lanes have no
    streams of their own.
    """
    layers = getattr(model, "model", model).layers.children()
    out, streams_of_layers = hooked(
        model, layers, ids, lambda out: (out[0] if isinstance(out, tuple) else out)[0]
    )
    streams = torch.stack([h if h.dim() == 3 else h[:, None] for h in streams_of_layers])
    return (out if isinstance(out, torch.Tensor) else out.logits)[0].numpy(), streams.numpy()


def main(arguments: list[str] | None = None) -> None:
    run_check("published", Options, check, arguments)


if __name__ == "__main__":
    main()
