"""Time from a model on the disk to the first token: the next starts, from packed weights, and the first one.

python -m tools.bench load HF_DIR or FILE.gguf
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from tools.bench import harness
from tools.bench.harness import Result
from tools.markdown import table

BUFFER_BYTES = 1 << 20
PROMPT_LENGTH = 8
FILE_START = "# From the disk to the first token"


@dataclass(kw_only=True)
class Options(harness.Options):
    """Time from a model to its first token, beside reading the same bytes through a small buffer.

    A packed model is mapped, not read, so its weights are first touched by the first pass: its limit is a read of
    the packed file from the page cache. A first start reads the model's own files and packs them: its limits are
    reads of those, from the disk (both begin with none of them in the page cache) and from the page cache. All
    alternate. The last line of stdout is JSON.
    """

    model: Annotated[Path, tyro.conf.Positional]
    """Model folder or GGUF file; it is packed first if it has not run before."""
    rounds: int = 5
    """Rounds of each read and each start."""
    threads: int | None = None
    """Threads of the engine; default: all cores."""


def measure(options: Options, console: Any) -> Result:
    """Medians of each figure, and of starts over reads within a round."""
    with console.status("packing, unless that was done before"):
        start(options)
    packed, own = newest_packed_file(options.model), own_files(options.model)
    rounds = list[dict[str, float]]()
    for _ in range(options.rounds):
        with console.status(f"round {len(rounds) + 1} of {options.rounds}"):
            rounds.append(one_round(options, packed, own))
    ratios = [(r["load_s"] + r["first_token_s"]) / r["read_s"] for r in rounds]
    return {
        **{name: statistics.median(r[name] for r in rounds) for name in rounds[0]}, "rounds": rounds,
        "start_over_read": statistics.median(ratios), "start_over_read_worst": max(ratios),
        "file_bytes": packed.stat().st_size, "own_bytes": sum(path.stat().st_size for path in own),
        **{f"first_{at}_over_read": statistics.median(r[f"first_{at}_s"] / r[f"own_{at}_read_s"] for r in rounds)
           for at in ("disk", "cached")},
    }  # fmt: skip


def one_round(options: Options, packed: Path, own: list[Path]) -> dict[str, float]:
    """Seconds of each read and each start; "first" is one without packed weights, which keeps none."""
    found = {"read_s": read([packed]), **start(options)}
    forget(own)
    found["own_disk_read_s"] = read(own)
    forget(own)
    found["first_disk_s"] = sum(start(options, cache=False).values())
    found["own_cached_read_s"] = read(own)
    found["first_cached_s"] = sum(start(options, cache=False).values())
    return found


def read(paths: Iterable[Path]) -> float:
    """Seconds of reading files through a small buffer."""
    buffer, began = bytearray(BUFFER_BYTES), time.perf_counter()
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began


def forget(paths: Iterable[Path]) -> None:
    """Drop files from the page cache; a file that a process has mapped stays."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # what is not yet on the disk would stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def start(options: Options, cache: bool = True) -> dict[str, float]:
    """Seconds until the engine is ready, and from then to the first token of a short prompt."""
    from laneformer import Engine  # here: `--help` needs no engine

    began = time.perf_counter()
    with Engine.from_pretrained(options.model, device="cpu", threads=options.threads, cache=cache) as engine:
        loaded = time.perf_counter()
        engine.generate(range(1, 1 + PROMPT_LENGTH), max_new_tokens=1, ignore_eos=True)
        return {"load_s": loaded - began, "first_token_s": time.perf_counter() - loaded}


def own_files(model: Path) -> list[Path]:
    """What a first start reads."""
    return [model] if model.is_file() else sorted(model.glob("*.safetensors"))


def newest_packed_file(model: Path) -> Path:
    from laneformer.engine.cpu.packed import PackedWeights

    files = [path for place in PackedWeights(model, []).directories() for path in place.glob("*.bin")]
    if not files:
        why = "is the disk too full, or are both cache folders read-only?"
        raise ValueError(f"{model} keeps no packed weights: {why}")
    return max(files, key=lambda path: path.stat().st_atime_ns)


def section(options: Options, result: Result) -> tuple[str, str]:
    packed, own = (result[name] / 1e9 for name in ("file_bytes", "own_bytes"))
    rows = [
        [
            "packed, from the page cache",
            result["load_s"] + result["first_token_s"],
            packed,
            "read_s",
            "start",
        ],
        ["first, from the page cache", result["first_cached_s"], own, "own_cached_read_s", "first_cached"],
        ["first, from the disk", result["first_disk_s"], own, "own_disk_read_s", "first_disk"],
    ]
    text = [
        [name, f"{start:.2f}", f"{size:.2f}", f"{result[read]:.2f}", f"{result[f'{ratio}_over_read']:.2f}"]
        for name, start, size, read, ratio in rows
    ]
    head = ["start", "to the first token, s", "GB", "a plain read, s", "start over read, within a round"]
    return f"`{options.model.name}`, {options.rounds} rounds, medians", table(head, text)
