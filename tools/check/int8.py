"""What int8 weights cost, in nats and in bits per byte against bf16; and does the engine
compute what int8 means?

    python -m tools.check.int8 runs/demo/hf --data runs/demo/data

What they mean is written down in `dequantised`. model.py in float64 on those weights is the reference; how far float32
may be from it, the engine shows on fp32 copies of them, and the int8 engine gets four times that error. An engine with
one of its scales doubled must be refused, else the gate proves nothing. KL and bits per byte are figures, not gates:
what a model may lose is its user's decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table

from data_mixtures.shards import tokenizer_path
from evals.bits_per_byte import bits_per_byte, load_windows, matching_token_bytes
from evals.scorer.engine import EngineScorer
from laneformer import Engine, LaneformerConfig
from laneformer.engine.cpu.decoder import CpuDecoder
from records.files import file_sha256
from tools.check.engine import MARGIN, load, mark, run, verdict
from tools.check.reference import Weights, dequantised, mean_kl, plain_model, relative_errors, tensors_of

POSITIONS = 128  # for the gate


@dataclass
class Options:
    """Check the int8 engine and measure what it loses; a table, and the last line of stdout is JSON."""

    hf_dir: tyro.conf.Positional[Path]
    """A Hugging Face folder."""
    data: Path
    """Directory made by `python -m data_mixtures.prepare`: its held-out windows are scored."""
    windows: int = 32
    """Windows of each source."""
    json: bool = False
    """Print nothing but the JSON line."""


def main(arguments: list[str] | None = None) -> None:
    run("check_int8", Options, __doc__, measure, lambda report: [table(report)], arguments)


def measure(options: Options, console: Console) -> dict[str, Any]:
    windows, categories = load_windows(options.data, options.windows)
    token_bytes = matching_token_bytes(options.hf_dir, options.data)
    config, weights = load(str(options.hf_dir))
    ids = next(iter(windows.values()))[0][: min(POSITIONS, config.max_position_embeddings)].tolist()
    about = {"model": str(options.hf_dir), "tokenizer_sha256": file_sha256(tokenizer_path(options.data))}
    return about | check(config, weights, ids) | cost(options.hf_dir, windows, categories, token_bytes)


def check(config: LaneformerConfig, weights: Weights, ids: list[int]) -> dict[str, Any]:
    """The gate on the logits after `ids`: relative errors of the engines, what is allowed,
    and the planted fault's.
    """
    meant = dequantised(weights)
    reference = plain_model(config, meant)(torch.tensor([ids]))[0].detach().numpy()

    def error_of(engine: Engine) -> float:
        return float(relative_errors(engine.logits(ids), reference).max())

    with Engine(config, tensors_of({name: weight.float() for name, weight in meant.items()})) as engine:
        allowed = MARGIN * error_of(engine)
    with Engine(config, tensors_of(weights), dtype="int8", kv_dtype="fp32") as engine:
        error = error_of(engine)
        decoder = engine._open()
        assert isinstance(decoder, CpuDecoder)
        first = 64 * -(
            -config.hidden_size // 2
        )  # of the scales: that of a query row of the first lane and layer
        decoder.part(0)[first : first + 4].view(np.float32)[:] *= 2
        planted = error_of(engine)
    passed = {"relative error": error <= allowed, "refuses: one scale doubled": planted > allowed}
    figures = {"relative_error": error, "allowed": allowed, "planted": planted, "positions": len(ids)}
    return {**figures, **verdict(passed)}


def cost(
    folder: Path, windows: dict[str, np.ndarray], categories: dict[str, str], token_bytes: np.ndarray
) -> dict[str, Any]:
    """KL(bf16 || int8) in nats and equal best ids, means over positions; bits per byte of both;
    on windows (n, S+1).
    """
    scorers = {name: EngineScorer(folder, device="cpu", dtype=name, cache=False) for name in ("bf16", "int8")}
    half, small = (scorer.engine for scorer in scorers.values())
    kl, same = [], []
    for row in np.concatenate(list(windows.values())):
        theirs, ours = (engine.logits(row[:-1].tolist()) for engine in (half, small))
        kl.append(mean_kl(theirs, ours))
        same.append((theirs.argmax(-1) == ours.argmax(-1)).mean())
    scored = {
        name: bits_per_byte(scorer, windows, categories, token_bytes) for name, scorer in scorers.items()
    }
    weight_bytes = {name: scorer.engine.weight_bytes for name, scorer in scorers.items()}
    for scorer in scorers.values():
        scorer.close()
    return {
        "kl": float(np.mean(kl)), "same_best_id": float(np.mean(same)),
        **{key: {name: figures[key] for name, figures in scored.items()} for key in ("bits_per_byte", "loss")},
        "tokens": sum(source["tokens"] for source in scored["int8"]["sources"].values()),
        "weight_bytes": weight_bytes,
    }  # fmt: skip


def table(report: dict[str, Any]) -> Table:
    shown = Table(title=f"{report['model']}: int8 weights against bf16")
    for column in ("", "bf16", "int8", "allowed", ""):
        shown.add_column(column, justify="right" if column else "left")
    error, planted, allowed = (f"{report[key]:.2e}" for key in ("relative_error", "planted", "allowed"))
    right, refused = (mark(held) for held in report["passed"].values())
    shown.add_row(f"logits of {report['positions']} positions, relative error", "", error, allowed, right)
    shown.add_row("planted: one scale doubled", "", planted, f"> {allowed}", refused)
    shown.add_section()
    for name in ("bits_per_byte", "loss", "weight_bytes"):
        pair = (f"{report[name][dtype]:,.4f}".removesuffix(".0000") for dtype in ("bf16", "int8"))
        shown.add_row(name.replace("_", " "), *pair)
    shown.add_row("KL(bf16 || int8), nats a token", "", f"{report['kl']:.2e}")
    shown.add_row(f"same best id, of {report['tokens']:,} tokens", "", f"{report['same_best_id']:.2%}")
    return shown


if __name__ == "__main__":
    main()
