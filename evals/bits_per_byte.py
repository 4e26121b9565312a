"""Bits per byte on the held-out windows of each source: how well the model predicts text it was not trained on.

    bits per byte = sum of -log2 p(token | the window so far), over the tokens that stand for bytes / their bytes

A byte token stands for one byte, `▁` for one space, any other piece for its UTF-8 bytes, a control token for none. So
models with different tokenizers can be compared. `loss` is the training loss: nats per token, control tokens included.

    python -m evals.bits_per_byte runs/demo/hf --data data/demo --out runs/demo/evals.jsonl --step 200
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from rich.progress import track

from data_mixtures.mixture import valid_windows
from data_mixtures.shards import read_manifests, tokenizer_path
from evals.items import Partial, open_partial
from evals.scorer import (
    LOCAL,
    AnswererFlags,
    Prompt,
    Scorer,
    identify_model,
    open_scorer,
    score_each,
)
from evals.tables import console, show_table
from records.command import check_ranges
from records.evals import (
    NOWHERE,
    AboutFlags,
    EvalCommand,
    Limit,
    ModelFolder,
    code_at_start,
)
from records.files import JsonObject, file_sha256

SPACE = "\u2581"  # ▁, SentencePiece's visible space
BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")


def sum_windows(
    scorer: Scorer, windows: Iterable[np.ndarray], token_bytes: np.ndarray
) -> Iterator[tuple[float, float, int, int]]:
    """Yield (nats of all tokens, nats of those that stand for bytes, tokens, bytes) of each window (S+1,)."""
    scored = score_each(scorer, windows, lambda window: [Prompt(window.tolist(), 1)])
    for index, (window, (scores,)) in enumerate(scored):
        targets = window[1:].astype(np.int64)
        nats = -scores.logprobs
        if nats.shape != targets.shape or not np.isfinite(nats).all():
            raise ValueError(
                f"window {index}: the model gave {nats.size} log-probabilities, {int((~np.isfinite(nats)).sum())} of "
                f"them not finite; {targets.size} finite ones are required"
            )
        bytes_of_target = token_bytes[targets]
        of_bytes = float(nats[bytes_of_target > 0].sum())
        yield float(nats.sum()), of_bytes, len(targets), int(bytes_of_target.sum())


def bits_per_byte(
    scorer: Scorer,
    windows: dict[str, np.ndarray],
    categories: dict[str, str],
    token_bytes: np.ndarray,
    partial: Partial,
) -> JsonObject:
    """Score the windows (n, S+1) of every source."""
    sources = dict[str, JsonObject]()
    everything = []
    for name, rows in windows.items():
        rows_in_progress = track(rows, description=f"{name:>16}", console=console)
        sums = partial.complete(
            name, rows_in_progress, lambda remaining: sum_windows(scorer, remaining, token_bytes)
        )
        sources[name] = {"category": categories[name], **figures_of(sums)}
        everything += sums
    # a source weighs by its bytes, in the loss by its tokens
    total = figures_of(everything)
    return {"bits_per_byte": total["bits_per_byte"], "loss": total["loss"], "sources": sources}


def figures_of(sums: list[tuple[float, float, int, int]]) -> JsonObject:
    nats, nats_of_bytes, tokens, byte_count = (
        math.fsum(column) for column in zip(*sums, strict=True)
    )
    if byte_count == 0:
        raise ValueError(f"no text to score: {tokens:.0f} tokens, none of which stands for bytes")
    value = nats_of_bytes / math.log(2) / byte_count
    return {
        "bits_per_byte": value,
        "loss": nats / tokens,
        "tokens": int(tokens),
        "bytes": int(byte_count),
    }


def load_windows(data: Path, count: int | None) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Load held-out windows (n, S+1) of every source that has some, at most `count`, and its category."""
    categories = {name: manifest["category"] for name, manifest in read_manifests(data).items()}
    windows = {name: valid_windows(data, name, max_windows=count) for name in categories}
    held_out = {name: rows for name, rows in windows.items() if len(rows)}
    if not held_out:
        raise ValueError(
            f"no source of {data} holds text out; raise valid_per_10000 in its recipe and prepare it again"
        )
    if empty := sorted(windows.keys() - held_out):
        console.print(f"no held-out windows, left out: {', '.join(empty)}", highlight=False)
    return held_out, categories


def load_token_bytes(model_dir: Path, data: Path) -> np.ndarray:
    """Return the bytes of each token id, int64 (V,).

    Raises:
        ValueError: the model's tokenizer is not the one that cut the data.
    """
    of_data, of_model = (
        count_token_bytes(path) for path in (tokenizer_path(data), model_dir / "tokenizer.json")
    )
    shared = min(len(of_data), len(of_model))
    if len(of_model) < len(of_data) or not np.array_equal(of_data[:shared], of_model[:shared]):
        raise ValueError(
            f"{model_dir}/tokenizer.json ({len(of_model)} tokens) is not the tokenizer of {data} ({len(of_data)} "
            "tokens), so the ids mean different texts; prepare the data with the model's tokenizer"
        )
    return of_model


def count_token_bytes(path: Path) -> np.ndarray:
    """Count the bytes of each token id, int64 (V,), 0 for control tokens."""
    from tokenizers import Tokenizer

    from laneformer.hf.tokenizer import tokenizer_from_sentencepiece

    is_json = path.suffix == ".json"
    tokenizer = Tokenizer.from_file(str(path)) if is_json else tokenizer_from_sentencepiece(path)
    # in a byte-level BPE each character of a piece is one byte
    of_bytes = "ByteLevel" in repr(tokenizer.decoder)
    if not of_bytes and not getattr(tokenizer.model, "byte_fallback", False):
        raise ValueError(
            f"{path} has neither byte fallback nor bytes as characters, so the bytes of its pieces cannot be counted; "
            "use a SentencePiece BPE with byte fallback, or a byte-level BPE"
        )
    added = tokenizer.get_added_tokens_decoder()
    pieces = tokenizer.get_vocab()
    unknown = getattr(tokenizer.model, "unk_token", None)
    # the counts of a text's ids add up to its bytes, plus the space that a Llama 2 tokenizer
    # prepends
    counts = np.zeros(max(pieces.values()) + 1, dtype=np.int64)
    for piece, i in pieces.items():
        if (i in added and added[i].special) or piece == unknown:
            continue
        if of_bytes and i not in added:
            counts[i] = len(piece)
        elif BYTE_PIECE.fullmatch(piece):
            counts[i] = 1
        else:
            counts[i] = len(piece.replace(SPACE, " ").encode())
    return counts


def show(figures: JsonObject) -> None:
    columns = ("source", "category", "bits/byte", "loss", "tokens", "bytes")
    rows = []
    for name, source in figures["sources"].items():
        numbers = (
            f"{source['bits_per_byte']:.4f}",
            f"{source['loss']:.4f}",
            f"{source['tokens']:,}",
        )
        rows.append([name, source["category"], *numbers, f"{source['bytes']:,}"])
    rows.append(["all", "", f"{figures['bits_per_byte']:.4f}", f"{figures['loss']:.4f}", "", ""])
    show_table("Bits per byte, held-out text", columns, rows, texts=2)


def main(
    hf_dir: ModelFolder,
    data: Path,
    limit: Limit = None,
    answerer: AnswererFlags = LOCAL,
    about: AboutFlags = NOWHERE,
) -> JsonObject:
    """Bits per byte of a model on the held-out windows of each source. The last line on stdout
    is the record, JSON.

    Args:
        data: directory written by `python -m data_mixtures.prepare`
        limit: maximum number of held-out windows to score per source
    """
    check_ranges(main, locals())
    rows, categories = load_windows(data, limit)
    token_bytes = load_token_bytes(hf_dir, data)
    scorer = open_scorer(hf_dir, answerer)
    who = identify_model(hf_dir, scorer) | {"tokenizer_sha256": file_sha256(tokenizer_path(data))}
    # what was scored: the same for the same windows in another folder
    digest = hashlib.sha256()
    for name in rows:
        digest.update(name.encode() + b"\0" + rows[name].tobytes())
    who |= {"data_sha256": digest.hexdigest()}
    partial = open_partial(about.out, "bits_per_byte", who, code_at_start())
    figures = bits_per_byte(scorer, rows, categories, token_bytes, partial)
    scorer.close()
    show(figures)
    record = about.append("bits_per_byte", figures | {"limit": limit}, **who)
    partial.remove()
    return record


COMMAND = EvalCommand("bits_per_byte", main, reads=("--data",))


if __name__ == "__main__":
    COMMAND.run()
