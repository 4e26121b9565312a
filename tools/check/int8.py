"""What int8 weights cost, in nats and in bits per byte against bf16; and does the engine
compute what int8 means?

    python -m tools.check engine runs/demo/hf --against int8 --data runs/demo/data

What they mean is written down in `dequantised`. model.py in float64 on those weights is the reference; how far float32
may be from it, the engine shows on fp32 copies of them, and the int8 engine gets four times that error. An engine with
one of its scales doubled must be refused, else the gate proves nothing. KL and bits per byte are figures, not gates:
what a model may lose is its user's decision.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from data_mixtures.shards import tokenizer_path
from evals.bits_per_byte import bits_per_byte, load_windows, matching_token_bytes
from evals.scorer.engine import EngineScorer
from laneformer import Engine, LaneformerConfig
from laneformer.engine.cpu.decoder import CpuDecoder
from records.files import file_sha256
from tools.check.gates import MARGIN, Options, load, verdict
from tools.check.reference import Weights, dequantised, mean_kl, plain_model, relative_errors, tensors_of


def measure(options: Options, console: Console) -> dict[str, Any]:
    """The gate, and what int8 costs. ValueError where there is nothing to score."""
    if options.data is None:
        raise ValueError("--against int8 needs --data, a directory made by python -m data_mixtures.prepare")
    folder = Path(options.model)
    config, weights = load(options.model)
    windows, categories = load_windows(options.data, options.windows)
    token_bytes = matching_token_bytes(folder, options.data)
    ids = next(iter(windows.values()))[0][: min(options.positions, config.max_position_embeddings)].tolist()
    about = {"model": options.model, "tokenizer_sha256": file_sha256(tokenizer_path(options.data))}
    costs = cost(folder, windows, categories, token_bytes)
    return {
        **about,
        **check(config, weights, ids),
        **costs,
        "tables": {"int8 weights against bf16": table_of(costs)},
    }


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
    gates = {
        "relative error": (error, allowed, error <= allowed),
        "refuses: one scale doubled": (planted, allowed, planted > allowed),
    }
    figures = {"relative_error": error, "allowed": allowed, "planted": planted, "positions": len(ids)}
    return {**figures, **verdict(gates)}


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


def table_of(costs: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [{"": name.replace("_", " "), **costs[name]} for name in ("bits_per_byte", "loss", "weight_bytes")]
    rows.append({"": r"KL(bf16 \|\| int8), nats a token", "bf16": "", "int8": costs["kl"]})
    rows.append(
        {"": f"same best id, of {costs['tokens']:,} tokens", "bf16": "", "int8": costs["same_best_id"]}
    )
    return rows
