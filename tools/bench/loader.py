"""Loaders on the same windows, machine and run, each in a process of its own: speed, mixture error, resume, stalls.

    python -m tools.bench.loader --out docs/benchmarks/2026-11-21-loader.md

The data are drawn tokens in five sources with the published phase-1 weights, in the page cache. Speed is tokens per
second of processor time on one core, so that other work on the machine counts little; in every round it stands beside
a NumPy copy of the same bytes. The last line of stdout is JSON.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tyro
from rich.console import Console

from data_mixtures import mixture, shards
from laneformer.engine.bench import cpu_name
from records.files import append_line, code_version
from tools.bench.loader_rivals import BATCH, CONTESTANTS, INSTALL, MOSAIC_FOLDER, worst_deviation

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = {"web": 6320, "code": 2100, "math": 630, "multilingual": 500, "qa": 450}
BARE = "Mixture.sequences"  # without threads around it, so there is nothing to stall or to resume
VOCAB_SIZE, ROWS_PER_GROUP = 32_000, 256
OTHER_WORLD_SIZE = {  # ours is tested (tests/train/test_data.py); of the others, what their code says
    "MixtureLoader": "any, exact",
    "torchtitan": "refused (asserts as many ranks)",
    "interleave_datasets": "by hand (skip)",
    "interleave_datasets, streaming": "no (a state a rank)",
    "mosaicml-streaming": "if the batch divides",
}


@dataclass
class Options:
    out: Path | None = None
    """Markdown file that gets a dated section."""
    windows: int = 12_288
    """Of all sources together; the prefixes that are judged must not be longer."""
    seq_len: int = 4096
    rounds: int = 3
    seconds: float = 1.0
    """How long one contestant reads in one round."""
    steps: int = 300
    """Steps of 20 ms, after which a batch is asked for."""
    sequences: int = 10_000
    """How far the mixture's error is followed."""
    resume_at: tuple[int, ...] = (10_000, 1_000_000, 1_000_000_000)
    only: tuple[str, ...] = field(default_factory=lambda: tuple(CONTESTANTS))


def main(arguments: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, args=arguments, prog="python -m tools.bench.loader", description=__doc__)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="bench-loader-") as folder:
        with console.status("writing the data in every contestant's form"):
            write_data(Path(folder), options)
        report = run(Path(folder), options, console)
    if options.out:
        append_line(options.out, section(options, report))
        console.print(f"added to {options.out}")
    print(json.dumps(report))


def write_data(data: Path, options: Options) -> None:
    """Shards with manifests and a lock; a Parquet file a source; one of all in the mixture's order for torchtitan."""
    total, generator = sum(WEIGHTS.values()), np.random.default_rng(1)
    entries = []
    for name, weight in WEIGHTS.items():
        windows = -(-options.windows * weight // total) + 1
        tokens = generator.integers(3, VOCAB_SIZE, windows * options.seq_len + 1, dtype=np.uint16)
        folder = data / name
        folder.mkdir()
        layout = shards.Layout(seed=1, seq_len=options.seq_len, windows_per_shard=8192, valid_per_10000=1)
        one_document = np.array([len(tokens)], dtype=np.uint32), np.zeros(1, dtype=np.uint64)
        written = shards.write_train(folder, tokens, *one_document, layout)
        held_out = shards.write_windows(folder / shards.VALID, tokens[: options.seq_len + 1], options.seq_len)
        manifest = {"format": shards.FORMAT, "category": name, "seq_len": options.seq_len, "tokenizer_sha256": "",
                    "vocab_size": VOCAB_SIZE, **written, "valid": held_out}  # fmt: skip
        shards.write_json(folder / shards.MANIFEST, manifest)
        entries.append({"name": name, "category": name, "weight": weight, "windows": windows, "epoch_cap": 10**9,
                        "manifest_sha256": shards.manifest_sha256(folder)})  # fmt: skip
        rows = np.lib.stride_tricks.sliding_window_view(tokens, options.seq_len + 1)[:: options.seq_len]
        write_rows(data / f"{name}.parquet", rows, np.full(windows, len(entries) - 1))
    lock = {"format": shards.FORMAT, "phase": "phase1", "seed": 1, "seq_len": options.seq_len, "sources": entries,
            "packing": mixture.PACKING, "tokenizer_sha256": "", "vocab_size": VOCAB_SIZE}  # fmt: skip
    shards.write_json(data / "phase1.lock.json", {**lock, "fingerprint": mixture.fingerprint(lock)})
    write_rows(data / "mixed.parquet", *mixture.Mixture.open(data / "phase1.lock.json").sequences(0, options.windows))


def write_rows(path: Path, tokens: np.ndarray, sources: np.ndarray) -> None:
    """Windows (n, S + 1) as rows of fixed-size lists of uint16, with the source of each."""
    values = pa.array(tokens.astype(np.uint16).ravel())
    columns = {"tokens": pa.FixedSizeListArray.from_arrays(values, tokens.shape[1]), "source": sources.astype(np.int64)}
    pq.write_table(pa.table(columns), path, row_group_size=ROWS_PER_GROUP)


def run(data: Path, options: Options, console: Console) -> dict[str, Any]:
    """Rounds, every contestant in turn: speed and stalls in each, what needs no repetition in the first."""
    names = [name for name in options.only if name != "mosaicml-streaming" or (MOSAIC_FOLDER / "streaming").is_dir()]
    measured: dict[str, dict[str, Any]] = {name: {} for name in names}
    probes: list[dict[str, float]] = []
    for number in range(options.rounds):
        probes.append(probe(data, options))
        for name in names:
            wanted: dict[str, Any] = {"speed": options.seconds}
            if name != BARE:
                wanted["stalls"] = options.steps
            if number == 0:
                once = {"deviation": options.sequences, "resume": options.resume_at}
                wanted = {**wanted, **once} if name != BARE else {"first_pass": options.windows, **wanted}
            with console.status(f"round {number + 1} of {options.rounds}: {name}"):
                for key, value in ask(name, data, wanted).items():
                    measured[name].setdefault(key, []).append(value)
    missing = {name: f"not installed: {INSTALL[name]}" for name in set(options.only) - set(names)}
    return {
        "contestants": measured, "missing": missing, "probes": probes, "random_draws": random_draws(options.sequences),
        "same_draw_on_every_rank": same_draw_on_every_rank(), "cpu": cpu_name(),
    }  # fmt: skip


def ask(name: str, data: Path, measure: dict[str, Any]) -> dict[str, Any]:
    """The figures of one contestant, in a process of its own. RuntimeError with what it said."""
    command = [sys.executable, "-m", "tools.bench.loader_rivals", "--name", name, "--data", str(data)]
    command += ["--measure", json.dumps(measure)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{name} failed at {measure}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def probe(data: Path, options: Options) -> dict[str, float]:
    """Upper limits here and now, tokens per second of processor time: the same bytes copied, and cast to int64."""
    tokens = np.fromfile(data / "web" / "shard-00000.bin", dtype=np.uint16)
    step = BATCH * options.seq_len
    parts = [tokens[i : i + step] for i in range(0, len(tokens) - step + 1, step)]
    rates = {}
    for name, dtype in (("copy", np.uint16), ("cast", np.int64)):
        count, started, wall = 0, time.process_time(), time.perf_counter()
        while time.perf_counter() - wall < options.seconds / 2:
            for part in parts:
                np.empty(len(part), dtype=dtype)[:] = part
            count += len(parts) * step
        rates[f"{name}_tokens_per_s"] = count / (time.process_time() - started)
    return rates


def random_draws(sequences: int, seeds: int = 20) -> dict[str, float]:
    """Median over seeds of the worst deviation when a source is drawn for each sequence, as many loaders do."""
    shares = np.array(list(WEIGHTS.values())) / sum(WEIGHTS.values())
    worst = [
        worst_deviation(np.random.default_rng(seed).choice(len(shares), sequences, p=shares), shares.tolist())
        for seed in range(seeds)
    ]
    return {limit: statistics.median(each[limit] for each in worst) for limit in worst[0]}


def same_draw_on_every_rank(ranks: int = 8, local_batch: int = 4, share: float = 0.21, steps: int = 2000) -> float:
    """Standard deviation of a source's share of a step when all ranks seed their draws alike, in points of 100."""
    draws = [random.Random(0) for _ in range(ranks)]
    shares = [
        statistics.mean(draw.choices((1, 0), (share, 1 - share))[0] for draw in draws for _ in range(local_batch))
        for _ in range(steps)
    ]
    return 100 * statistics.pstdev(shares)


def section(options: Options, report: dict[str, Any]) -> str:
    limits = {key: statistics.median(each[key] for each in report["probes"]) / 1e6 for key in report["probes"][0]}
    table = [row(name, each, limits["copy_tokens_per_s"]) for name, each in report["contestants"].items()]
    first = report["contestants"].get(BARE, {}).get("first_pass_tokens_per_s", [0])[0] / 1e6
    drawn = ", ".join(f"{worst:.0f} at {int(limit):,}" for limit, worst in report["random_draws"].items())
    missing = "".join(f"\n{name}: {what}" for name, what in report["missing"].items())
    return f"""
## {time.strftime("%Y-%m-%d %H:%M", time.gmtime())} UTC: loaders on the same windows

{report["cpu"]}; commit {code_version(ROOT / "tools")}; {options.windows} windows of {options.seq_len} tokens from the
page cache in {len(WEIGHTS)} sources, batches of {BATCH}; medians of {options.rounds} rounds. Stalls: after each of
{options.steps} steps that sleep for 20 ms; a rival has a worker process that reads ahead.

| loader | M tokens/s/core | % of a copy | mixture error (sequences) | to resume | other ranks | stall p50 / p99 (ms) |
|---|---|---|---|---|---|---|
{chr(10).join(table)}

NumPy copies the same bytes at {limits["copy_tokens_per_s"]:.0f} M tokens/s and casts them to int64, as every loader
has to, at {limits["cast_tokens_per_s"]:.0f} M. The first pass of Mixture.sequences, in which every block is read and
hashed, runs at {first:.0f} M tokens/s/core. A source drawn at random for each sequence is off by {drawn}
sequences (median of 20 seeds). Where all ranks seed those draws alike, 8 ranks of 4 sequences give a source of 21 % a
share of the step that has a standard deviation of {report["same_draw_on_every_rank"]:.0f} points.{missing}"""


def row(name: str, figures: dict[str, Any], copied: float) -> str:
    rate = statistics.median(figures["tokens_per_s"]) / 1e6
    (worst,), (resumed,) = figures.get("deviation", [None]), figures.get("resume_s", [{}])
    error = ", ".join(f"{value:.2f} at {int(limit):,}" for limit, value in worst.items()) if worst else "-"
    notes = [reason for reason in resumed.values() if isinstance(reason, str)]
    times = [f"{float(at):.0e}: {value:.2f} s" for at, value in resumed.items() if not isinstance(value, str)]
    stall = "-"
    if "stall_p99_s" in figures:
        stall = " / ".join(f"{1e3 * statistics.median(figures[f'stall_{p}_s']):.2f}" for p in ("p50", "p99"))
    cells = [name, f"{rate:.1f}", f"{100 * rate / copied:.1f}", error,
             "; ".join([*times, *dict.fromkeys(notes)]) or "-", OTHER_WORLD_SIZE.get(name, "-"), stall]  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
