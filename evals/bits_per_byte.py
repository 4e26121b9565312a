"""Bits per byte on the held-out windows of each source: how well the model predicts text it never saw.

    bits per byte = sum of -log2 p(token | the window so far), over the tokens that stand for bytes / their bytes

Control tokens (BOS, EOS) count in neither sum. `loss` is the mean over all predicted tokens, control tokens included,
in nats: the same quantity as the training loss. Windows are scored as the training sees them: packed documents, each
token in the context of its own window.

    python -m evals.bits_per_byte runs/demo/hf --data data/demo --out runs/demo/evals.jsonl --step 200 --phase phase2
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from data_mixtures.mixture import valid_windows
from evals.token_bytes import bytes_per_token
from records.evals import NOWHERE, AboutFlags, EvalCommand
from records.files import file_sha256


class Scorer(Protocol):
    """What is asked of a model; `laneformer.Engine` is one."""

    def logprobs(self, ids: Sequence[int]) -> np.ndarray:
        """log p(ids[i+1] | ids[:i+1]) for every i, float (len(ids) - 1,)."""
        ...


def score_windows(scorer: Scorer, windows: Iterable[np.ndarray], token_bytes: np.ndarray) -> dict[str, Any]:
    """Score windows (S+1,) of one source: bits_per_byte, loss (nats per token), tokens, bytes."""
    nats_all, nats_of_bytes, tokens, byte_count = 0.0, 0.0, 0, 0
    for index, window in enumerate(windows):
        targets = window[1:].astype(np.int64)
        nats = -np.asarray(scorer.logprobs(window.tolist()), dtype=np.float64)
        if nats.shape != targets.shape or not np.isfinite(nats).all():
            raise ValueError(
                f"window {index}: the model gave {nats.size} log-probabilities, {int((~np.isfinite(nats)).sum())} of "
                f"them not finite; {targets.size} finite ones are needed"
            )
        bytes_of_target = token_bytes[targets]
        nats_all += float(nats.sum())
        nats_of_bytes += float(nats[bytes_of_target > 0].sum())
        tokens += len(targets)
        byte_count += int(bytes_of_target.sum())
    if byte_count == 0:
        raise ValueError(f"no text to score: {tokens} tokens, none of which stands for bytes")
    value = nats_of_bytes / math.log(2) / byte_count
    return {"bits_per_byte": value, "loss": nats_all / tokens, "tokens": tokens, "bytes": byte_count}


def bits_per_byte(
    scorer: Scorer, windows: dict[str, np.ndarray], categories: dict[str, str], token_bytes: np.ndarray
) -> dict[str, Any]:
    """Score the windows (n, S+1) of every source; a total weighs a source by its bytes, and the loss by its tokens."""
    console = Console(stderr=True)
    sources = {
        name: {"category": categories[name]}
        | score_windows(scorer, track(rows, description=f"{name:>16}", console=console), token_bytes)
        for name, rows in windows.items()
    }

    def mean(figure: str, weight: str) -> float:
        total = math.fsum(source[weight] for source in sources.values())
        return math.fsum(source[figure] * source[weight] for source in sources.values()) / total

    return {"bits_per_byte": mean("bits_per_byte", "bytes"), "loss": mean("loss", "tokens"), "sources": sources}


def load_windows(data: Path, count: int | None) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Held-out windows (n, S+1) of every source of a data directory, at most `count` each, and its category."""
    manifests = sorted(data.glob("*/source.json"))
    if not manifests:
        raise ValueError(f"{data} holds no <source>/source.json; make it with `python -m data_mixtures.prepare`")
    categories = {m.parent.name: json.loads(m.read_text(encoding="utf-8"))["category"] for m in manifests}
    return {name: valid_windows(data, name, max_windows=count) for name in categories}, categories


def matching_token_bytes(model_dir: Path, data: Path) -> np.ndarray:
    """Bytes of each token id, (V,); refuses a model whose tokenizer is not the one that cut the data."""
    of_data, of_model = (bytes_per_token(path) for path in (data / "tokenizer.model", model_dir / "tokenizer.json"))
    shared = min(len(of_data), len(of_model))
    if len(of_model) < len(of_data) or not np.array_equal(of_data[:shared], of_model[:shared]):
        raise ValueError(
            f"{model_dir}/tokenizer.json ({len(of_model)} tokens) is not the tokenizer of {data} ({len(of_data)} "
            "tokens): the ids would mean other texts; prepare the data with the model's tokenizer"
        )
    return of_model


def show(figures: dict[str, Any]) -> None:
    """Print the figures as a table on stderr."""
    table = Table(title="Bits per byte, held-out text")
    for column in ("source", "category", "bits/byte", "loss", "tokens", "bytes"):
        table.add_column(column, justify="left" if column in ("source", "category") else "right")
    for name, source in figures["sources"].items():
        numbers = (f"{source['bits_per_byte']:.4f}", f"{source['loss']:.4f}", f"{source['tokens']:,}")
        table.add_row(name, source["category"], *numbers, f"{source['bytes']:,}")
    table.add_section()
    table.add_row("all", "", f"{figures['bits_per_byte']:.4f}", f"{figures['loss']:.4f}", "", "")
    Console(stderr=True).print(table)


def main(
    hf_dir: Annotated[Path, tyro.conf.Positional],
    data: Path,
    windows: int | None = None,
    about: AboutFlags = NOWHERE,
    device: str = "auto",
) -> None:
    """Bits per byte of a model on the held-out windows of each source. The last line on stdout is the record, JSON.

    Args:
        hf_dir: folder of the exported model
        data: directory made by `python -m data_mixtures.prepare`
        windows: windows of each source to score; all by default
        about: where the record goes, and what it is about
        device: where the engine runs: auto, cpu or cuda
    """
    from laneformer import Engine  # the compiled part: scoring with another model does not need it

    started = time.perf_counter()
    rows, categories = load_windows(data, windows)
    token_bytes = matching_token_bytes(hf_dir, data)
    engine = Engine.from_pretrained(hf_dir, device=device)
    figures = bits_per_byte(engine, rows, categories, token_bytes)
    engine.close()
    show(figures)
    digest = hashlib.sha256()
    for name in rows:
        digest.update(name.encode() + b"\0" + rows[name].tobytes())
    record = about.append(
        "bits_per_byte",
        figures,
        seconds=time.perf_counter() - started,
        tokenizer_sha256=file_sha256(data / "tokenizer.model"),
        data_sha256=digest.hexdigest(),
    )
    print(json.dumps(record))


COMMAND = EvalCommand("bits_per_byte", main)


if __name__ == "__main__":
    COMMAND.run()
