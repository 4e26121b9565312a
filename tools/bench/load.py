"""Time from a packed model folder to the first token, next to reading the same bytes from the page cache.

    python -m tools.bench.load HF_DIR [--rounds 5] [--out FILE.md]

A model that has run before is mapped, not read; the first pass over its weights is the first time they are touched. The
limit is a plain read of the packed file through a small buffer, taken in turn with the starts in the same process. The
last line of stdout is JSON.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from laneformer import Engine
from laneformer.engine.bench import cpu_name
from laneformer.engine.cpu.packed import PackedWeights
from records.files import append_line, code_version

BUFFER_BYTES = 1 << 20
PROMPT_LENGTH = 8


@dataclass
class Options:
    hf_dir: Annotated[Path, tyro.conf.Positional]
    rounds: int = 5
    threads: int | None = None
    out: Path | None = None
    """Markdown file that gets a dated section."""


def main(arguments: list[str] | None = None) -> None:
    options = tyro.cli(Options, args=arguments, prog="python -m tools.bench.load", description=__doc__)
    console = Console(stderr=True)
    with console.status("packing, unless that was done before"):
        start(options)
    path = newest_packed_file(options.hf_dir)
    rounds = []
    for number in range(options.rounds):
        with console.status(f"round {number + 1} of {options.rounds}"):
            rounds.append({"read_s": read_s(path), **start(options)})
    report = {**medians(rounds), "file_bytes": path.stat().st_size, "rounds": rounds, "cpu": cpu_name()}
    if options.out:
        append_line(options.out, section(options, report))
        console.print(f"added to {options.out}")
    print(json.dumps(report))


def start(options: Options) -> dict[str, float]:
    """Seconds until the engine is there, and from then to the first token of a short prompt."""
    began = time.perf_counter()
    with Engine.from_pretrained(options.hf_dir, device="cpu", threads=options.threads) as engine:
        loaded = time.perf_counter()
        engine.generate(range(1, 1 + PROMPT_LENGTH), max_new_tokens=1, ignore_eos=True)
        return {"load_s": loaded - began, "first_token_s": time.perf_counter() - loaded}


def read_s(path: Path) -> float:
    buffer = bytearray(BUFFER_BYTES)
    began = time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - began


def newest_packed_file(folder: Path) -> Path:
    files = [path for place in PackedWeights(folder, []).directories() for path in place.glob("*.bin")]
    if not files:
        raise SystemExit(f"{folder} keeps no packed weights: is the disk too full, or both cache folders read-only?")
    return max(files, key=lambda path: path.stat().st_atime_ns)


def medians(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Of each figure, and of (load + first token) / read within a round."""
    ratios = [(r["load_s"] + r["first_token_s"]) / r["read_s"] for r in rounds]
    middle = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    return {**middle, "start_over_read": statistics.median(ratios), "start_over_read_worst": max(ratios)}


def section(options: Options, report: dict[str, Any]) -> str:
    return f"""
## {time.strftime("%Y-%m-%d %H:%M", time.gmtime())} UTC: from packed weights to the first token

    python -m tools.bench.load {options.hf_dir}

{report["cpu"]}; commit {code_version(Path(__file__).parent)}; {report["file_bytes"] / 1e9:.2f} GB packed,
{options.rounds} rounds, medians: load {report["load_s"]:.2f} s, first token of {PROMPT_LENGTH} ids
{report["first_token_s"]:.2f} s more; a plain read of the file from the page cache {report["read_s"]:.2f} s. Load and
first token over that read, within a round: {report["start_over_read"]:.2f} (worst
{report["start_over_read_worst"]:.2f})."""


if __name__ == "__main__":
    main()
