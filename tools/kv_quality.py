"""What keys and values in fewer bits cost a model: `python -m tools.kv_quality MODEL --text FILE`.

Beside fp32 keys and values: the loss of a long text by depth, what it moves at one token, the needles that are found in
it, and the speed of decoding behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import tyro
from rich.progress import track
from tokenizers import Tokenizer

from laneformer.engine import Engine
from laneformer.engine.bench import after
from laneformer.engine.decoder import KV_BYTES
from records.files import write_atomically

from .markdown import records

NEEDLE = "\n\nThe secret number of {city} is {number}.\n\n"
QUESTION = "\n\nWhat is the secret number of {city}? The secret number of {city} is"
CITIES = ("Lisbon", "Oslo", "Cairo", "Lima", "Kyoto", "Dakar", "Quito", "Turin")


@dataclass
class Options:
    model: tyro.conf.Positional[Path]
    """A folder or GGUF file, as `laneformer generate` takes."""
    text: Path
    """A long text in UTF-8."""
    dtype: str = "auto"
    """Of the weights; fp32 and bf16 are computed with exactly, and int8 products add noise of their own."""
    windows: int = 2
    """Windows of the text that are scored, each as long as the context."""
    context_tokens: int = 8192
    """Tokens of a window, and of the longest text around a needle."""
    needles: int = 8
    """Needles at each length: a quarter, a half and the whole of the context."""
    new_tokens: int = 32
    """Decoded behind a window, for the speed."""
    threads: int | None = None
    """Of the engine."""
    out: Path | None = None
    """Markdown file of the table; default: the terminal alone."""


@dataclass
class Kind:
    """What one type of keys and values gave."""

    position_bytes: float
    logprobs: np.ndarray  # (windows, context - 1), nats
    found: dict[int, int]  # needles, by length of the text
    tokens_per_s: float  # behind the first window


def main(options: Options) -> None:
    kinds = {}
    for kind in track(KV_BYTES, "types of keys and values"):
        engine = Engine.from_pretrained(
            options.model,
            dtype=options.dtype,
            context_tokens=options.context_tokens,
            kv_dtype=kind,
            threads=options.threads,
        )
        with engine:
            kinds[kind] = measure(engine, options)
    said = report(kinds, options.needles)
    print(said)
    if options.out:
        write_atomically(options.out, said + "\n")


def measure(engine: Engine, options: Options) -> Kind:
    if engine.tokenizer is None:
        raise ValueError(f"{options.model} has no tokenizer")
    ids = engine.tokenizer.encode(options.text.read_text(encoding="utf-8")).ids
    size = options.context_tokens
    if len(ids) < options.windows * size:
        raise ValueError(
            f"{options.text} has {len(ids)} tokens; --windows {options.windows} need {options.windows * size}"
        )
    windows = [ids[i * size : (i + 1) * size] for i in range(options.windows)]
    logprobs = np.stack([engine.logprobs(window, start=1) for window in windows])
    found = {
        length: needles(engine, engine.tokenizer, ids, length, options.needles)
        for length in (size // 4, size // 2, size)
    }
    return Kind(
        engine.config.cached_bytes(1, *KV_BYTES[engine.kv_dtype]),
        logprobs,
        found,
        speed(engine, windows[0], options.new_tokens),
    )


def needles(engine: Engine, tokenizer: Tokenizer, ids: list[int], length: int, count: int) -> int:
    """How many numbers the model says again, hidden at depths from the beginning to the end of `length` tokens."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    found, rng = 0, np.random.default_rng(0)
    for i in range(count):
        city, number = CITIES[i % len(CITIES)], str(rng.integers(1000, 10000))
        needle, question = encode(NEEDLE.format(city=city, number=number)), encode(QUESTION.format(city=city))
        hay = ids[: max(0, length - len(needle) - len(question) - 8)]
        at = len(hay) * (2 * i + 1) // (2 * count)
        made = engine.generate([*hay[:at], *needle, *hay[at:], *question], max_new_tokens=8, ignore_eos=True)
        found += number in tokenizer.decode(made)
    return found


def speed(engine: Engine, window: list[int], tokens: int) -> float:
    """Tokens a second behind all of the window but their own room; the median of three."""
    seconds = [after(engine, window[: -tokens - 1], tokens).whole.token_s.sum() for _ in range(3)]
    return (tokens - 1) / float(np.median(seconds))


def report(kinds: dict[str, Kind], needles: int) -> str:
    exact, rows = kinds["fp32"], []
    for name, kind in kinds.items():
        row = {"keys and values": name, "bytes a position": f"{kind.position_bytes:,.0f}"}
        width = kind.logprobs.shape[1]
        edges = [0, width // 8, width // 4, width // 2, width]
        for low, high in pairwise(edges):
            own, before = (-k.logprobs[:, low:high].mean() for k in (kind, exact))
            text = f"{own:.4f}" if kind is exact else f"{own - before:+.4f}"
            row[f"nats a token, {low:,} to {high:,}"] = text
        moved = np.abs(kind.logprobs - exact.logprobs).mean()
        row["moved at a token, mean"] = f"{moved:.4f}"
        for length, found in kind.found.items():
            row[f"needles in {length:,}"] = f"{found} of {needles}"
        row["tokens/s behind the text"] = f"{kind.tokens_per_s:.1f}"
        rows.append(row)
    return records(rows)


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, prog="python -m tools.kv_quality", description=__doc__))
    except (ValueError, OSError, OverflowError) as error:  # a value beyond fp16's
        raise SystemExit(f"tools.kv_quality: {error}") from None
