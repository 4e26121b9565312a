"""Does a model compute the same in the engine, in our modeling code, and in the code that it was published with?

    python -m tools.check parity FOLDER --trust-remote-code        python -m tools.check parity model.gguf

The reference is model.py in float64 on the weights as the engine reads them. Our modeling code in float32 shows what
rounding costs; everybody gets four times its largest error, for the logits and for the stream after each layer, so the
first layer beyond that is where a difference begins. The published code is the folder's own (it runs only with
--trust-remote-code) or, for models of the Llama family, Transformers'.

    S positions   V vocabulary   N layers   L lanes   D hidden
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table

from laneformer import Engine, LaneformerConfig
from laneformer.engine.folder import read_checkpoint, read_json
from tools.check.engine import MARGIN, compare_greedy, run, verdict
from tools.check.reference import (
    TORCH_DTYPES,
    hf_model,
    model_outputs,
    module_report,
    plain_model,
    relative_errors,
)


@dataclass
class Options:
    """Compare engine, our code and published code; the last line of stdout is JSON. Exit status 1 if they differ."""

    model: Annotated[Path, tyro.conf.Positional]
    """A Hugging Face folder of a Laneformer or of the Llama family, or a GGUF file."""
    trust_remote_code: bool = False
    """Run the Python code in the folder."""
    positions: int = 128
    """Length of the compared text."""
    prompts: int = 4
    """Prompts whose greedy continuation is compared token for token."""
    new_tokens: int = 32
    """Length of those continuations."""
    json: bool = False
    """Print nothing but the JSON line."""


def main(arguments: list[str] | None = None) -> None:
    run("parity", Options, __doc__, check, lambda report: [table(report)], arguments)


def check(options: Options, console: Console) -> dict[str, Any]:
    gguf = options.model.is_file()
    checkpoint = read_checkpoint(options.model, dtype="fp32")
    config, weights = checkpoint.config, {}
    for name, tensor in checkpoint.tensors.items():
        weights[name] = torch.from_numpy(np.array(tensor.values)).view(TORCH_DTYPES[tensor.dtype])
    length = min(options.positions, config.max_position_embeddings)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, length).tolist()
    console.print(f"model.py in float64 on {length} positions", style="dim")
    truth = plain_model(config, weights)
    logits, streams = outputs(truth, ids)
    ours = plain_model(config, weights).float() if config.borrowed() else hf_model(config, weights, torch.float32)
    single, single_streams = outputs(ours, ids)
    errors = {"our modeling code": relative_errors(single, logits).max()}
    layers = {"our modeling code": stream_errors(single_streams, streams)}
    allowed = MARGIN * errors["our modeling code"]
    worst = float(np.abs(single - logits).max())
    greedy: dict[str, Any] = {}
    console.print("the engine", style="dim")
    with Engine.from_pretrained(options.model, device="cpu", dtype="fp32" if gguf else "auto", cache=False) as engine:
        errors["engine"] = relative_errors(engine.logits(ids), logits).max()
        positions = list(range(0, length, max(1, length // 16)))
        reference = model_outputs(truth, ids, positions)[1]
        modules = module_report(engine.config, engine._partials(ids, positions), reference, positions, "exact")
        if (published := published_model(options)) is not None:
            console.print(f"the published code: {type(published).__name__}", style="dim")
            theirs, their_streams = outputs(published, ids)
            errors["published code"] = relative_errors(theirs, logits).max()
            layers["published code"] = stream_errors(their_streams, streams)
            greedy = compare_greedy(engine, published, options, 2 * (MARGIN + 1) * worst)  # type: ignore[arg-type]
    allowed_stream = MARGIN * np.maximum.accumulate(layers["our modeling code"])
    beyond = [i for i, error in enumerate(layers.get("published code", [])) if not error <= allowed_stream[i]]
    passed = {f"logits: {who}": bool(errors[who] <= allowed) for who in ("engine", "published code") if who in errors}
    passed |= {"modules: engine": modules["first_wrong"] is None}
    passed |= {"layers: published code": not beyond, "greedy tokens": not greedy["unexplained"]} if greedy else {}
    report = {
        "model": str(options.model), "positions": length, "allowed": float(allowed), "greedy": greedy,
        "relative_error": {who: float(error) for who, error in errors.items()}, "layers": layers,
        "first_wrong": {"engine": modules["first_wrong"], "published code": beyond[0] if beyond else None},
        "published_code": None if published is None else type(published).__name__, **verdict(passed),
    }  # fmt: skip
    if beyond:
        report["rebroadcast_early"] = other_reading(config, weights, ids, theirs, float(allowed))
    return report


def published_model(options: Options) -> Any:
    """Transformers' model in float32; None where that is the folder's own code, which may not run."""
    from transformers import AutoModelForCausalLM

    folder, arguments = options.model, dict[str, Any](trust_remote_code=options.trust_remote_code)
    if folder.is_file():
        folder, arguments = folder.parent, {"gguf_file": folder.name}
    elif "auto_map" in read_json(folder / "config.json") and not options.trust_remote_code:
        return None
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **arguments).eval()
    except Exception as error:  # of whatever kind the folder's code raises
        raise ValueError(f"the published code of {options.model} does not load: {error}") from error


@torch.no_grad()
def outputs(model: Any, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits (S, V) and the streams after each layer (N, S, L, D), L = 1 where lanes have no streams of their own."""
    kept: list[torch.Tensor] = []
    layers = getattr(model, "model", model).layers.children()
    keep = lambda module, given, out: kept.append((out[0] if isinstance(out, tuple) else out)[0])  # noqa: E731
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    try:
        out = model(torch.tensor([ids]))
    finally:
        for hook in hooks:
            hook.remove()
    streams = torch.stack([h if h.dim() == 3 else h[:, None] for h in kept])
    return (out if isinstance(out, torch.Tensor) else out.logits)[0].numpy(), streams.numpy()


def stream_errors(streams: np.ndarray, reference: np.ndarray) -> list[float]:
    """For each layer the largest distance of a stream over its length."""
    distance = np.linalg.norm(streams - reference, axis=-1) / np.linalg.norm(reference, axis=-1)
    return [float(error) for error in distance.max((1, 2))]


def other_reading(config: LaneformerConfig, weights: Any, ids: list[int], theirs: np.ndarray, allowed: float) -> Any:
    """The value of `rebroadcast_early` with which the published code agrees, or None."""
    other = dataclasses.replace(config, rebroadcast_early=not config.rebroadcast_early)
    agrees = relative_errors(theirs, outputs(plain_model(other, weights), ids)[0]).max() <= allowed
    return other.rebroadcast_early if agrees else None


def table(report: dict[str, Any]) -> Table:
    shown = Table(title=f"{report['model']}: relative error against float64, allowed {report['allowed']:.2g}")
    for column in ("", "logits", "worst layer", "first difference"):
        shown.add_column(column)
    for who, error in report["relative_error"].items():
        worst = max(report["layers"].get(who, [0.0]))
        first = report["first_wrong"].get(who)
        shown.add_row(who, f"{error:.2g}", f"{worst:.2g}" if worst else "", "none" if first is None else f"{first}")
    if report.get("rebroadcast_early") is not None:
        shown.caption = f"the published code agrees with rebroadcast_early = {report['rebroadcast_early']}: set it"
    return shown


if __name__ == "__main__":
    main()
