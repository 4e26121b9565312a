"""Time from a packed model folder to the first token, beside reading the same bytes from the page cache.

python -m tools.bench load HF_DIR
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from tools.bench import harness
from tools.bench.harness import Result

BUFFER_BYTES = 1 << 20
PROMPT_LENGTH = 8
FILE_START = "# From packed weights to the first token"


@dataclass(kw_only=True)
class Options(harness.Options):
    """Time from a packed model folder to the first token, beside reading the same bytes from the page cache.

    A packed model is mapped, not read, so its weights are first touched by the first pass. The limit is a
    plain read of the packed file through a small buffer, which alternates with the starts. The last line
    of stdout is JSON.
    """

    hf_dir: Annotated[Path, tyro.conf.Positional]
    """Model folder; it is packed first if it has not run before."""
    rounds: int = 5
    """Rounds of one read and one start."""
    threads: int | None = None
    """Threads of the engine; default: all cores."""


def measure(options: Options, console: Any) -> Result:
    """Medians of each figure, and of (load + first token) / read within a round."""
    with console.status("packing, unless that was done before"):
        start(options)
    path, rounds = newest_packed_file(options.hf_dir), list[dict[str, float]]()
    for _ in range(options.rounds):
        with console.status(f"round {len(rounds) + 1} of {options.rounds}"):
            buffer, began = bytearray(BUFFER_BYTES), time.perf_counter()
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
            rounds.append({"read_s": time.perf_counter() - began, **start(options)})
    ratios = [(r["load_s"] + r["first_token_s"]) / r["read_s"] for r in rounds]
    return {
        **{name: statistics.median(r[name] for r in rounds) for name in rounds[0]}, "rounds": rounds,
        "start_over_read": statistics.median(ratios), "start_over_read_worst": max(ratios),
        "file_bytes": path.stat().st_size,
    }  # fmt: skip


def start(options: Options) -> dict[str, float]:
    """Seconds until the engine is ready, and from then to the first token of a short prompt."""
    from laneformer import Engine  # here: `--help` needs no engine

    began = time.perf_counter()
    with Engine.from_pretrained(options.hf_dir, device="cpu", threads=options.threads) as engine:
        loaded = time.perf_counter()
        engine.generate(range(1, 1 + PROMPT_LENGTH), max_new_tokens=1, ignore_eos=True)
        return {"load_s": loaded - began, "first_token_s": time.perf_counter() - loaded}


def newest_packed_file(folder: Path) -> Path:
    from laneformer.engine.cpu.packed import PackedWeights

    files = [path for place in PackedWeights(folder, []).directories() for path in place.glob("*.bin")]
    if not files:
        why = "is the disk too full, or are both cache folders read-only?"
        raise ValueError(f"{folder} keeps no packed weights: {why}")
    return max(files, key=lambda path: path.stat().st_atime_ns)


def section(options: Options, result: Result) -> tuple[str, str]:
    return "from packed weights to the first token", (
        f"{result['file_bytes'] / 1e9:.2f} GB packed, {options.rounds} rounds, medians: load {result['load_s']:.2f} s, "
        f"first token of {PROMPT_LENGTH} ids {result['first_token_s']:.2f} s more; a plain read of the file from the "
        f"page cache {result['read_s']:.2f} s. Load and first token over that read, within a round: "
        f"{result['start_over_read']:.2f} (worst {result['start_over_read_worst']:.2f})."
    )
