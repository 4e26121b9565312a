"""Decode speed on the CPU, alternating with llama.cpp and Transformers, with the read bandwidth measured in between.

    python -m tools.bench decode --against llamacpp,transformers --out docs/benchmarks/2026-11-21-cpu-decode.md
    python -m tools.bench load HF_DIR        time from packed weights to the first token

The read bandwidth of a shared machine changes within seconds, so a speed is never reported alone: FILE_START says how
trials, probes and ratios are taken.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from laneformer import LaneformerConfig
from tools.bench import harness
from tools.bench.decode_baselines import CANDIDATES, Dtype
from tools.bench.harness import Candidate, Result, alternate, spread, table

OURS = "laneformer"
FIGURES = ("tokens_per_s", "percent_of_probe", "other_cpus")
BUFFER_BYTES = 1 << 20
PROMPT_LENGTH = 8
PREFILL_LENGTHS = (128, 512)
PREFILL_ROUNDS = 3
SETTLE_S = 0.3  # OpenMP threads spin for a while after their last work before they sleep
FILE_START = """# Decode speed on CPU, in paired runs

Each section is one run of its command. Random weights of one shape in 16 bits, one request, greedy. A round measures
every candidate once, in alternating order, each in a process of its own while the others sleep; a read probe (that of
`laneformer bench`: the same threads, a sequential read of a buffer far larger than the caches) runs before and after
every trial. "% of probe": weight bytes read per second over the mean of the two probes around the trial; keys and
values are not counted. "Other CPUs": CPU time that other processes used during the trials, per second; near 0 on a
quiet machine. Ratios are taken within a round, since a shared machine changes; on a busy one they also show which
candidate copes better with other load."""


@dataclass(kw_only=True)
class Options(harness.Options):
    """Decode speed on the CPU, alternating with other engines; the last line of stdout is JSON."""

    against: str = "llamacpp,transformers"
    """Comma-separated baselines; one that is not installed is reported as such, and the others still run."""
    flavor: Literal["2b", "300m", "tiny"] = "300m"
    """Shape of the model."""
    dtype: Dtype = "bf16"
    """Element type of the weights of every candidate."""
    threads: int = 2
    """Threads of every candidate and of the probe."""
    pairs: int = 8
    """Rounds; in each, every candidate decodes once."""
    new_tokens: int = 64
    """Tokens timed in a trial."""
    depth: int = 0
    """Cached positions before the timed tokens."""

    def names(self) -> list[str]:
        """Our engine and the baselines; ValueError for an option that cannot be measured."""
        for name in ("threads", "pairs", "new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        most = LaneformerConfig.from_flavor(self.flavor).max_position_embeddings - self.new_tokens - 1
        if not 0 <= self.depth <= most:
            raise ValueError(f"depth = {self.depth} is outside 0 to {most} (the context less the new tokens)")
        baselines = [name.strip() for name in self.against.split(",") if name.strip()]
        for name in baselines:
            if name not in CANDIDATES or name == OURS:
                raise ValueError(f"unknown baseline {name!r}; choose from {sorted(set(CANDIDATES) - {OURS})}")
        return [OURS, *dict.fromkeys(baselines)]


def main(arguments: list[str] | None = None) -> None:
    harness.run("decode", Options, compare, section, FILE_START, arguments)


def candidate(name: str, flavor: str, dtype: Dtype, threads: int) -> Candidate:
    command = ["-m", "tools.bench.decode_baselines", "--name", name, "--flavor", flavor, "--dtype", dtype]
    return Candidate(name, [*command, "--threads", str(threads)], {"OMP_NUM_THREADS": str(threads)}, SETTLE_S)


def compare(options: Options, console: Any) -> Result:
    """Every figure of the report. RuntimeError if our own engine does not start."""
    names, config, facts = options.names(), LaneformerConfig.from_flavor(options.flavor), dict[str, Result]()
    candidates = {name: candidate(name, options.flavor, options.dtype, options.threads) for name in names}
    try:
        for name in names:
            with console.status(f"starting {name}"):
                facts[name] = candidates[name].ask("facts")
            console.print(f"{name}: {', '.join(map(str, facts[name].values()))}", style="dim", markup=False)
        missing = {name: fact["missing"] for name, fact in facts.items() if "missing" in fact}
        if OURS in missing:
            raise RuntimeError(f"our own engine did not start: {missing[OURS]}")
        present = {name: candidates[name] for name in names if name not in missing}
        rounds = decode_rounds(options, config, present, facts, console)
        prefill = prefill_rounds(config, present, console)
        bench = present[OURS].ask("bench", flavor=options.flavor)
    finally:
        for each in candidates.values():
            each.close()
    figures = {name: {key: spread([r[key][name] for r in rounds]) for key in FIGURES} for name in present}
    found = {name: {**facts[name], **figures[name], "prefill_tokens_per_s": prefill[name]} for name in present}
    return {
        "flavor": options.flavor, "dtype": options.dtype, "threads": options.threads, "depth": options.depth,
        "candidates": found, "ratios": {name: ratio(rounds, name) for name in present if name != OURS},
        "probe_bytes_per_s": spread([probe for r in rounds for probe in r["probes"]]),
        "bench": bench, "rounds": rounds, "missing": missing,
    }  # fmt: skip


def decode_rounds(
    options: Options, config: LaneformerConfig, candidates: dict[str, Any], facts: Result, console: Any
) -> list[Result]:
    """One dict per round: the order, FIGURES by name, and the probes in between."""
    rng = np.random.default_rng(0)

    def probe() -> float:
        return candidates[OURS].ask("bench", flavor="tiny")["probe_bytes_per_s"]

    rounds: list[Result] = []
    for each in candidates.values():
        each.ask("decode", prompt=[5], new_tokens=options.new_tokens)  # warm-up: pages, clocks
    for order in alternate(candidates, options.pairs):
        prompt = rng.integers(3, config.vocab_size, max(options.depth, 1)).tolist()
        probes, speed, percent, others = [probe()], {}, {}, {}
        for name in order:
            before = candidates[name].cpu_clocks()
            speed[name] = candidates[name].ask("decode", prompt=prompt, new_tokens=options.new_tokens)
            wall_s, own_s, busy_s = (b - a for a, b in zip(before, candidates[name].cpu_clocks(), strict=True))
            others[name] = max(0.0, busy_s - own_s) / wall_s
            probes.append(probe())
            percent[name] = 100 * speed[name] * facts[name]["weight_bytes_per_token"] / (sum(probes[-2:]) / 2)
        rounds.append({"order": order, **dict(zip(FIGURES, (speed, percent, others), strict=True)), "probes": probes})
        figures = ", ".join(f"{name} {speed[name]:.1f} ({percent[name]:.0f}%)" for name in candidates)
        console.print(f"round {len(rounds)} of {options.pairs}: {figures}; probe {np.mean(probes) / 1e9:.1f} GB/s")
    return rounds


def prefill_rounds(config: LaneformerConfig, candidates: dict[str, Any], console: Any) -> dict[str, dict[str, float]]:
    """Prompt tokens/s by candidate and prompt length: medians over rounds."""
    rng = np.random.default_rng(1)  # new prompts every time, so that a cached prefix cannot count as speed
    lengths = [length for length in PREFILL_LENGTHS if length < config.max_position_embeddings]
    found: dict[str, dict[str, list[float]]] = {name: {str(n): [] for n in lengths} for name in candidates}
    with console.status("prefill"):
        for order in alternate(candidates, PREFILL_ROUNDS):
            for length, name in ((length, name) for length in lengths for name in order):
                prompt = rng.integers(3, config.vocab_size, length).tolist()
                found[name][str(length)].append(candidates[name].ask("prefill", prompt=prompt))
    return {name: {n: float(np.median(speeds)) for n, speeds in by.items()} for name, by in found.items()}


def ratio(rounds: list[Result], baseline: str) -> Result:
    """Our speed over the baseline's within each round."""
    ratios = [r["tokens_per_s"][OURS] / r["tokens_per_s"][baseline] for r in rounds]
    ahead = sum(value > 1 for value in ratios)
    return {"median": float(np.median(ratios)), "min": min(ratios), "max": max(ratios), "ahead": ahead,
            "pairs": len(ratios)}  # fmt: skip


def section(options: Options, result: Result) -> tuple[str, str]:
    bench, probe, found, rounds = (result[k] for k in ("bench", "probe_bytes_per_s", "candidates", "rounds"))
    listed = [f"- {name}: {c['version']}; {c['settings']}" for name, c in found.items()]
    listed += [f"- {name}: left out, {reason}" for name, reason in result["missing"].items()]
    ratios = [
        [name, *(f"{r[k]:.2f}" for k in ("median", "min", "max")), f"{r['ahead']} of {r['pairs']}"]
        for name, r in result["ratios"].items()
    ]
    every_round = [
        [str(index), *(f"{r['tokens_per_s'][name]:.1f} ({r['percent_of_probe'][name]:.0f}%)" for name in found),
         " ".join(f"{each / 1e9:.1f}" for each in r["probes"])]
        for index, r in enumerate(rounds, 1)
    ]  # fmt: skip
    parts = [
        "\n".join(listed),
        f"Probe: {probe['median'] / 1e9:.1f} GB/s (p10 {probe['p10'] / 1e9:.1f}, p90 {probe['p90'] / 1e9:.1f}). "
        f"{len(rounds)} rounds of {options.new_tokens} tokens each; prefill in tokens/s.",
        speeds(found),
        table(["ours over", "median", "min", "max", "ahead in"], ratios),
        f"`laneformer bench` right after, with its probe between its segments: {bench['tokens_per_s']:.1f} tokens/s, "
        f"{bench['percent_of_probe']:.0f}% of {bench['probe_bytes_per_s'] / 1e9:.1f} GB/s "
        f"(p10 {bench['percent_of_probe_p10']:.0f}%, p90 {bench['percent_of_probe_p90']:.0f}%); "
        f"{1e3 * bench['token_s_p50']:.1f} ms per token, p99 {1e3 * bench['token_s_p99']:.1f} ms.",
        table(["round", *found, "probes, GB/s"], every_round),
    ]
    title = f"`{options.flavor}` in {options.dtype}, {options.threads} threads, depth {options.depth}"
    return title, "\n\n".join(parts)


def speeds(candidates: dict[str, Result]) -> str:
    columns = ["", "tokens/s", "p10", "p90", "MB/token", "% of probe", "p10", "p90", "other CPUs"]
    columns += [f"prefill {length}" for length in candidates[OURS]["prefill_tokens_per_s"]]
    rows = []
    for name, c in candidates.items():
        speed = [f"{value:.1f}" for value in (*c["tokens_per_s"].values(), c["weight_bytes_per_token"] / 1e6)]
        percent = [f"{value:.0f}" for value in c["percent_of_probe"].values()]
        prefill = [f"{value:.0f}" for value in c["prefill_tokens_per_s"].values()]
        rows.append([name, *speed, *percent, f"{c['other_cpus']['median']:.2f}", *prefill])
    return table(columns, rows)


@dataclass(kw_only=True)
class LoadOptions(harness.Options):
    """Time from a packed model folder to the first token, beside reading the same bytes from the page cache.

    A packed model is mapped, not read, so its weights are first touched by the first pass. The limit is a plain read of
    the packed file through a small buffer, which alternates with the starts. The last line of stdout is JSON.
    """

    hf_dir: Annotated[Path, tyro.conf.Positional]
    """Model folder; it is packed first if it has not run before."""
    rounds: int = 5
    """Rounds of one read and one start."""
    threads: int | None = None
    """Threads of the engine; default: all cores."""


def load(arguments: list[str] | None = None) -> None:
    harness.run(
        "load", LoadOptions, compare_starts, load_section, "# From packed weights to the first token", arguments
    )


def compare_starts(options: LoadOptions, console: Any) -> Result:
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


def start(options: LoadOptions) -> dict[str, float]:
    """Seconds until the engine is ready, and from then to the first token of a short prompt."""
    from laneformer import Engine  # here: decode reports an engine that is not built

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


def load_section(options: LoadOptions, result: Result) -> tuple[str, str]:
    return "from packed weights to the first token", (
        f"{result['file_bytes'] / 1e9:.2f} GB packed, {options.rounds} rounds, medians: load {result['load_s']:.2f} s, "
        f"first token of {PROMPT_LENGTH} ids {result['first_token_s']:.2f} s more; a plain read of the file from the "
        f"page cache {result['read_s']:.2f} s. Load and first token over that read, within a round: "
        f"{result['start_over_read']:.2f} (worst {result['start_over_read_worst']:.2f})."
    )
