"""Time to the first token of a long prompt after a restart: computed, and resumed from `--cache-dir`.

python -m tools.bench restart --tokens 4096 131071
"""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from laneformer import LaneformerConfig
from tools.bench import harness
from tools.bench.harness import Result
from tools.markdown import table

if TYPE_CHECKING:
    from laneformer import Engine

NEW_TOKENS = 16
CACHE_BYTES = 8 * 10**9
FILE_START = """# Prompts after a restart

Random weights. A prompt is read by an engine that saves it at its end; another engine with the same weights and
directory is asked the same. The last id of a prompt is computed in any case. The limit is a plain read of the file."""


@dataclass(kw_only=True)
class Options(harness.Options):
    """Time to the first token of a long prompt after a restart: computed, and resumed from `--cache-dir`.

    Fails where the resumed engine writes other tokens. The last line of stdout is JSON.
    """

    config: str = "300m"
    """A flavor."""
    dtype: str = "int8"
    """Type of the weights."""
    tokens: list[int] = field(default_factory=lambda: [4096])
    """Lengths of prompts."""
    threads: int | None = None
    """Threads of the engine; default: all cores."""


def measure(options: Options, console: Any) -> Result:
    """A row a length."""
    rows = []
    for tokens in options.tokens:
        with console.status(f"{tokens} ids"):
            directory = Path(tempfile.mkdtemp())
            try:
                rows.append(row(options, tokens, directory))
            finally:
                shutil.rmtree(directory)
        console.print(rows[-1])
    return {"rows": rows}


def row(options: Options, tokens: int, directory: Path) -> Result:
    prompt = np.random.default_rng(tokens).integers(0, 1000, tokens).tolist()
    with opened(options, tokens, directory) as engine:
        computed, computed_s = asked(engine, prompt)
        began = time.perf_counter()
    saved_s = time.perf_counter() - began
    files = [path for path in directory.rglob("*") if path.is_file()]
    began = time.perf_counter()
    size = sum(len(path.read_bytes()) for path in files)
    read_s = time.perf_counter() - began
    with opened(options, tokens, directory) as engine:
        resumed, resumed_s = asked(engine, prompt)
        reused = engine.saved_prefixes["hit_tokens"]
    if resumed != computed:
        raise ValueError(f"{tokens} ids: resumed tokens {resumed} are not the computed ones {computed}")
    return {"tokens": tokens, "reused": reused, "computed_s": computed_s, "resumed_s": resumed_s,
            "saved_s": saved_s, "read_s": read_s, "bytes": size}  # fmt: skip


def opened(options: Options, tokens: int, directory: Path) -> Engine:
    from laneformer import Engine  # here: `--help` needs no engine

    config = LaneformerConfig.from_flavor(options.config, max_position_embeddings=tokens + NEW_TOKENS)
    return Engine.random(
        config,
        options.dtype,
        device="cpu",
        threads=options.threads,
        cache_dir=directory,
        cache_bytes=CACHE_BYTES,
    )


def asked(engine: Engine, prompt: list[int]) -> tuple[list[int], float]:
    """New tokens, and seconds to the first of them."""
    began = time.perf_counter()
    stream = engine.stream(prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True, speculate=0)
    first = next(stream)
    first_s = time.perf_counter() - began
    return [first, *stream], first_s


def section(options: Options, result: Result) -> tuple[str, str]:
    head = [
        "prompt",
        "resumed",
        "computed, s",
        "resumed, s",
        "times",
        "MB",
        "plain read, s",
        "saved at the end, s",
    ]
    rows = [
        [row["tokens"], row["reused"], row["computed_s"], row["resumed_s"], row["computed_s"] / row["resumed_s"],
         row["bytes"] / 1e6, row["read_s"], row["saved_s"]]
        for row in result["rows"]
    ]  # fmt: skip
    return f"{options.config}, {options.dtype}", table(head, rows)
