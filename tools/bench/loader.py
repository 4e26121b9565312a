"""Training data loaders on the same windows, each in a process of its own: speed,
mixture error, resume, stalls.

    python -m tools.bench loader --out docs/benchmarks/2026-11-22-loader.md

The data are random tokens in five sources with the published phase-1 weights, in the page cache. CPU
time is counted, so that other work on the machine has little effect; every round also times a NumPy copy
of the same bytes.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_mixtures.mixture import Mixture
from tools.bench import harness
from tools.bench.harness import Candidate, Result, alternate
from tools.bench.loader_baselines import LOADERS, VOCAB_SIZE, install
from tools.bench.loader_process import BATCH, cpu_rate, worst_deviation
from tools.markdown import table
from tools.synthetic import write_lock

WEIGHTS = {"web": 6320, "code": 2100, "math": 630, "multilingual": 500, "qa": 450}
BARE = "Mixture.sequences"  # ours without threads: what reading and verifying cost
ROWS_PER_GROUP = 256
OTHER_WORLD_SIZE = {  # ours is tested (tests/train/test_data.py); the others according to their code
    BARE: "any, exact",
    "MixtureLoader": "any, exact",
    "torchtitan": "refused (asserts the same number of ranks)",
    "interleave_datasets": "manual (skip)",
    "interleave_datasets, streaming": "no (one state per rank)",
    "mosaicml-streaming": "if the batch divides",
    "olmo-core": "if the batch divides",
    "megatron-core": "if the batch divides",
    "litdata": "by its elastic resume",
    "grain": "by hand (one state per rank); TorchTitan's refuses",
}
FILE_START = """# Training data loaders

Every loader runs in a process of its own on the same random tokens, already tokenized, in the form that it asks for.
Speed is tokens per second of CPU time of one core, all threads of the loader together; batches are int64 tensors."""


@dataclass(kw_only=True)
class Options(harness.Options):
    """Compare training data loaders on the same windows; the last line of stdout is JSON."""

    windows: int = 12_288
    """Windows of all sources together; at least as many as `sequences`."""
    seq_len: int = 4096
    """Tokens per window."""
    rounds: int = 3
    """Rounds; in each, every loader is measured once."""
    seconds: float = 1.0
    """How long one loader reads in one round."""
    steps: int = 300
    """Simulated training steps of 20 ms, each followed by a request for a batch."""
    sequences: int = 10_000
    """Sequences over which the mixture error is followed."""
    resume_at: tuple[int, ...] = (10_000, 1_000_000, 1_000_000_000)
    """Sequences at which resuming is timed."""
    only: tuple[str, ...] = field(default_factory=lambda: tuple(LOADERS))
    """Loaders to measure."""


def measure(options: Options, console: Any) -> Result:
    """Speed and stalls in every round, what needs no repetition in the first; a new process
    per loader and round.
    """
    names = [name for name in options.only if install(name) is None]
    measured: dict[str, Result] = {name: {} for name in names}
    probes: list[Result] = []
    with (
        tempfile.TemporaryDirectory(prefix="bench-loader-") as folder,
        console.status("writing data") as status,
    ):
        data = Path(folder)
        write_data(data, options)
        for order in alternate(names, options.rounds):
            first = not probes
            probes.append(probe(data, options))
            for name in order:
                status.update(f"round {len(probes)} of {options.rounds}: {name}")
                commands: Result = {"speed": options.seconds, "stalls": options.steps}
                if first:
                    figures_of(name, data, {"prepare": 0})  # by another process: no import is warm in `start`
                    once = {"deviation": options.sequences, "resume": options.resume_at}
                    commands = {"start": 0} | commands | once
                if first and name == BARE:
                    commands["first_pass"] = options.windows
                for key, value in figures_of(name, data, commands).items():
                    measured[name].setdefault(key, []).append(value)
    missing = {name: install(name) for name in options.only if name not in names}
    drawn = random_draws(options.sequences)
    return {"loaders": measured, "missing": missing, "probes": probes, "random_draws": drawn}


def write_data(data: Path, options: Options) -> None:
    """Shards with manifests and a lock; a Parquet file per source; one of all in the
    mixture's order for torchtitan.
    """
    generator, tokens = np.random.default_rng(1), {}
    for index, (name, weight) in enumerate(WEIGHTS.items()):
        windows = -(-options.windows * weight // sum(WEIGHTS.values())) + 1
        count = (windows + 1) * options.seq_len + 1
        tokens[name] = generator.integers(3, VOCAB_SIZE, count, dtype=np.uint16)
        rows = np.lib.stride_tricks.sliding_window_view(tokens[name], options.seq_len + 1)[:: options.seq_len]
        write_rows(data / f"{name}.parquet", rows[:windows], np.full(windows, index))
    lock = write_lock(data, tokens, WEIGHTS, options.seq_len, VOCAB_SIZE, windows_per_shard=8192)
    write_rows(data / "mixed.parquet", *Mixture.open(lock).sequences(0, options.windows))


def write_rows(path: Path, tokens: np.ndarray, sources: np.ndarray) -> None:
    """Windows (n, S + 1) as rows of fixed-size lists of uint16, with the source of each."""
    values = pa.array(tokens.astype(np.uint16).ravel())
    columns = {
        "tokens": pa.FixedSizeListArray.from_arrays(values, tokens.shape[1]),
        "source": sources.astype(np.int64),
    }
    pq.write_table(pa.table(columns), path, row_group_size=ROWS_PER_GROUP)


def figures_of(name: str, data: Path, commands: Result) -> Result:
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    with contextlib.closing(
        Candidate(name, ["-m", "tools.bench.loader_baselines", name, str(data)], environment)
    ) as process:
        answers = [process.ask(do, argument=argument) for do, argument in commands.items()]
    return {key: value for answer in answers for key, value in answer.items()}


def probe(data: Path, options: Options) -> Result:
    """Upper limits of this machine now, tokens per second of CPU time: the same bytes copied,
    and cast to int64.
    """
    tokens = np.fromfile(data / "web" / "shard-00000.bin", dtype=np.uint16)
    step = BATCH * options.seq_len
    parts = tokens[: len(tokens) // step * step].reshape(-1, BATCH, options.seq_len)

    def write(dtype: type) -> int:
        for part in parts:
            np.empty(part.shape, dtype)[:] = part
        return parts.size

    dtypes = {"copy": np.uint16, "cast": np.int64}
    rates = {
        name: cpu_rate(functools.partial(write, dtype), options.seconds / 2) for name, dtype in dtypes.items()
    }
    return {f"{name}_tokens_per_s": rate for name, rate in rates.items()}


def random_draws(sequences: int, seeds: int = 20) -> dict[str, float]:
    """Median over seeds of the worst deviation when a source is drawn for each sequence, as many loaders do."""
    shares = [weight / sum(WEIGHTS.values()) for weight in WEIGHTS.values()]
    drawn = (np.random.default_rng(seed).choice(len(shares), sequences, p=shares) for seed in range(seeds))
    worst = [worst_deviation(sources, shares) for sources in drawn]
    return {limit: statistics.median(each[limit] for each in worst) for limit in worst[0]}


def section(options: Options, result: Result) -> tuple[str, str]:
    copy, cast = (
        statistics.median(p[f"{k}_tokens_per_s"] for p in result["probes"]) / 1e6 for k in ("copy", "cast")
    )
    columns = ["loader", "M tokens/s/core", "% of a copy", "mixture error (sequences)", "to start", "to resume",
               "other ranks", "memory (MB)", "stall p50 / p99 (ms)"]  # fmt: skip
    first = result["loaders"].get(BARE, {}).get("first_pass_tokens_per_s", [])
    checked = "".join(f" The first pass of {BARE}, in which every block is read and hashed, runs at {rate / 1e6:.0f} M "
                      "tokens/s/core." for rate in first)  # fmt: skip
    drawn = ", ".join(f"{worst:.0f} at {int(limit):,}" for limit, worst in result["random_draws"].items())
    parts = [
        f"{options.windows} windows of {options.seq_len} tokens from the page cache in {len(WEIGHTS)} sources, batches "
        f"of {BATCH}; medians of {options.rounds} rounds. Stalls: after each of {options.steps} steps that sleep for "
        "20 ms; a baseline has a worker process that reads ahead. To start: from the start of the process to the "
        "first batch, with all imports (torch and torchtitan in every process) and the files of its order that a "
        "loader writes, which are there when it resumes. Memory is what the process has of its own (RssAnon).",
        table(columns, [row(name, each, copy) for name, each in result["loaders"].items()]),
        f"NumPy copies the same bytes at {copy:.0f} M tokens/s and casts them to int64, as every loader has to, at "
        f"{cast:.0f} M.{checked} A source drawn at random for each sequence is off by {drawn} sequences (median of 20 "
        "seeds). Where all ranks seed those draws alike, 8 ranks of 4 sequences give a source of 21 % a share of the "
        f"step that has a standard deviation of {100 * (0.21 * 0.79 / 4) ** 0.5:.0f} points, that of 4 draws.",
        *(f"{name}: not installed: {line}" for name, line in result["missing"].items()),
    ]
    return "loaders on the same windows", "\n\n".join(parts)


def row(name: str, figures: Result, copied: float) -> list[str]:
    rate, p50, p99 = (
        statistics.median(figures[key]) for key in ("tokens_per_s", "stall_p50_s", "stall_p99_s")
    )
    deviation, resume = figures["deviation"][0], figures["resume_s"][0]
    error = ", ".join(f"{value:.2f} at {int(limit):,}" for limit, value in deviation.items())
    reasons = [reason for reason in resume.values() if isinstance(reason, str)]
    times = [f"{float(at):.0e}: {value:.2f} s" for at, value in resume.items() if not isinstance(value, str)]
    return [
        name, f"{rate / 1e6:.1f}", f"{rate / copied / 1e4:.1f}", error or "-", f"{figures['start_s'][0]:.1f} s",
        "; ".join([*times, *dict.fromkeys(reasons)]), OTHER_WORLD_SIZE[name],
        f"{figures['memory_bytes'][0] / 1e6:.0f}", f"{1e3 * p50:.2f} / {1e3 * p99:.2f}",
    ]  # fmt: skip
