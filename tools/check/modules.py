"""What every module puts out, per layer, module and lane: the decode engine against model.py in float64.

Logits say that something is wrong, these say where: the first module in order of execution whose error is beyond what
rounding explains. How much that is follows from the arithmetic alone (`allowed_error`), not from a measurement.

    P chosen positions   N layers   L lanes   D hidden
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from rich.table import Table

from laneformer import Laneformer, LaneformerConfig
from laneformer.config import MODULES, Join

FP32, BF16 = 2.0**-24, 2.0**-9  # unit roundoff: the largest relative error of one rounding to nearest
ROUNDED_INPUTS = 2  # of a module's matrices in a row: the normed stream, then the mixed values or the gated ones
AMPLIFICATION = 4.0  # by a product of two inexact factors (gate and up, scores and values), in both modules of a layer


@torch.no_grad()
def model_outputs(model: Laneformer, ids: Sequence[int], positions: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits (S, V) and the modules' partial outputs (P, N, 2, L, D), both in the model's dtype."""
    kept: list[torch.Tensor] = []
    modules = [layer.get_submodule(name) for layer in model.layers.children() for name in ("attention", "feed_forward")]
    hooks = [module.register_forward_hook(lambda m, i, out: kept.append(out[0, list(positions)])) for module in modules]
    try:
        logits = model(torch.tensor([list(ids)]))[0]
    finally:
        for hook in hooks:
            hook.remove()
    return logits.numpy(), torch.stack(kept, 1).unflatten(1, (-1, len(MODULES))).numpy()


def chosen_positions(config: LaneformerConfig, length: int) -> list[int]:
    """The first positions, those on both sides of each window's edge, after the ring has wrapped, and the last one."""
    windows = {config.window(i) for i in range(config.num_hidden_layers)} - {None}
    wanted = {0, 1, 10, length - 1}
    for window in windows:
        if window:
            wanted |= {window - 1, window, window + 16, ring_slots(window) - 1, ring_slots(window)}
    return sorted(p for p in wanted if 0 <= p < length)


def ring_slots(window: int) -> int:
    """Positions that the engine's ring holds (`cache_slots` of model.h): the next one overwrites the first."""
    return -(-(window + window // 8 + 31) // 16) * 16


def relative_errors(partials: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Distance of two outputs over the reference's length, (P, N, 2, L)."""
    return np.linalg.norm(partials - reference, axis=-1) / np.linalg.norm(reference, axis=-1)


def cosines(partials: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Of the angle between two outputs, (P, N, 2, L)."""
    wide = partials.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=-1) * np.linalg.norm(reference, axis=-1)
    return (wide * reference).sum(-1) / np.maximum(lengths, np.finfo(np.float64).tiny)


def allowed_error(config: LaneformerConfig, depth: int, math: str) -> np.ndarray:
    """The relative error that rounding explains at a position with `depth` before it, (N, 2).

    A sum of K products in float32 errs by about sqrt(K) roundings, as their signs are independent (the worst case, K,
    has never been seen). A module's longest chain sums over D inputs of the norm and of the first matrix, then over
    head dimensions and positions or over a lane's intermediate size. With math "bf16" the inputs of its matrices are
    rounded to bf16 before; such errors are independent as well, and do not grow with K. A stream is a sum of modules'
    outputs, so what the n-th module receives is wrong by no more than n such errors; that they partly cancel, and that
    the norm divides by the whole stream, is left as reserve. Weights are widened exactly: their dtype plays no part.
    """
    sums = (2 * config.hidden_size, config.head_dim, depth + 1, config.intermediate_size // config.num_lanes)
    one_module = FP32 * sum(np.sqrt(k) for k in sums) + (ROUNDED_INPUTS * BF16 if math == "bf16" else 0.0)
    count = np.arange(1, config.num_hidden_layers * len(MODULES) + 1)
    return (AMPLIFICATION * one_module * count).reshape(-1, len(MODULES))


def module_report(
    config: LaneformerConfig, partials: np.ndarray, reference: np.ndarray, positions: Sequence[int], math: str
) -> dict[str, Any]:
    """Errors by depth and module, worst over lanes; `first_wrong` names the first module beyond its allowance."""
    errors, cosine = relative_errors(partials, reference).max(-1), cosines(partials, reference).min(-1)
    allowed = np.array([allowed_error(config, position, math) for position in positions])
    # two vectors whose distance is e of one's length enclose an angle of at most arcsin(e)
    allowed_cosine = np.sqrt(1 - np.minimum(allowed, 1) ** 2) - config.hidden_size * 2.0**-53
    wrong = ((errors > allowed) | (cosine < allowed_cosine) | ~np.isfinite(errors)).any(0)
    by_depth = [
        {
            "depth": position + 1, "module": module, "relative_error": float(errors[p, :, m].max()),
            "cosine": float(cosine[p, :, m].min()), "layer": int((errors / allowed)[p, :, m].argmax()),
            "of_allowed": float((errors / allowed)[p, :, m].max()),
        }
        for p, position in enumerate(positions)
        for m, module in enumerate(MODULES)
    ]  # fmt: skip
    return {"by_depth": by_depth, "first_wrong": first_module(wrong), "of_allowed": float((errors / allowed).max())}


def first_module(wrong: np.ndarray) -> list[Any] | None:
    """[layer, module] of the first true entry of (N, 2) in order of execution."""
    if not wrong.any():
        return None
    layer, module = divmod(int(wrong.reshape(-1).argmax()), len(MODULES))
    return [layer, MODULES[module]]


def first_affected(config: LaneformerConfig, other: LaneformerConfig) -> list[Any] | None:
    """The first module that reads a stream which two configs join differently; None where only the head does."""

    def joined(config: LaneformerConfig, layer: int, module: str) -> tuple[Join, int | None]:
        how, source = config.join(layer, module), layer - config.broadcast_delay
        return how, source if how == Join.PAST and config.broadcasts(source, module) else None

    modules = [(layer, module) for layer in range(config.num_hidden_layers) for module in MODULES]
    changed = [joined(config, *module) != joined(other, *module) for module in modules]
    return first_module(np.array([False, *changed[:-1]]).reshape(-1, len(MODULES)))


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
