"""Decode, prefill and batches on the CPU, alternating with llama.cpp and Transformers, with
read probes in between.

    python -m tools.bench decode --against llamacpp,transformers --out docs/benchmarks/DATE-cpu-decode.md
    python -m tools.bench decode --model MODEL.gguf --dtype int4 --depth 0 2000 4000 --prefill 128 512
    4000 --batch 2 8

The read bandwidth of a shared machine changes within seconds, so a speed is never reported alone: FILE_START
says how trials, probes and ratios are taken.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from laneformer import LaneformerConfig
from tools.bench import experts, harness
from tools.bench.decode_baselines import LONG_PROMPT
from tools.bench.decode_candidates import INSTALL, Dtype, Math, names_of
from tools.bench.harness import Candidate, Result, alternate, check_at_least, spread
from tools.markdown import table

OURS = "laneformer"
OWN = ("isa", "math", "kv_dtype")  # options of our engine; each value of each makes a candidate
SETTLE_S = 0.3  # OpenMP threads spin for a while after their last work before they sleep
KINDS = {"decode": "decode at depth", "prefill": "prompt of", "batch": "batch of"}
FIGURES = ("tokens_per_s", "percent_of_probe", "other_cpus")
FILE_START = """# Decode speed on CPU, in paired runs

Each section is one run of its command. One model's weights in the same number of bits for everyone, one request,
greedy. A round measures every candidate once, in alternating order, each in a process of its own while the others
sleep; a read probe (that of `laneformer bench`: the same threads, a sequential read of a buffer far larger than the
caches) runs before and after every trial. "% of probe": bytes of weights, keys and values read per second over the mean
of the two probes around the trial. "Other CPUs": CPU time that other processes used during the trials, per second; near
0 on a quiet machine. Ratios are taken within a round, since a shared machine changes; on a busy one they also show
which candidate copes better with other load. A baseline with several ways to run (mapped file or not, flash attention
or not, kinds of cache) takes the fastest one for each workload, found by trials of that workload."""


@dataclass(frozen=True)
class Workload:
    """What is timed: tokens after `size` cached positions, a prompt of `size` ids, or
    `size` sequences at once.
    """

    kind: str
    size: int

    def __str__(self) -> str:
        return f"{KINDS[self.kind]} {self.size}"


@dataclass(kw_only=True)
class Options(harness.Options):
    """Speed on the CPU, alternating with other engines; the last line of stdout is JSON."""

    against: str = "llamacpp,transformers"
    """Comma-separated baselines; one that is not installed is reported as such, and the others still run."""
    flavor: Literal["2b", "300m", "tiny"] | experts.Flavor = "300m"
    """Shape of the model, with random weights; qwen3moe and gpt-oss are four layers of Qwen3-30B-A3B and gpt-oss-20b
    in a GGUF file, with --dtype gguf.
    """
    model: Path | None = None
    """A GGUF file of a Llama-family model instead; others than 16-bit ones are converted to
    bf16 for everyone first.
    """
    dtype: Dtype = "bf16"
    """Weights of every candidate; llama.cpp has Q8_0 for int8, and both Q4_0 and Q4_K_M for int4; gguf: of all the
    file as it is.
    """
    math: tuple[Math, ...] = ("auto",)
    """Arithmetic of our engine; each further one is a candidate of its own."""
    isa: tuple[str, ...] = ("auto",)
    """Instruction sets of our engine, such as avx512 avx2; likewise, and compared with the first."""
    kv_dtype: tuple[str, ...] = ("auto",)
    """Types of our keys and values, such as fp16 int8; likewise."""
    threads: int = 2
    """Threads of every candidate and of the probe."""
    pairs: int = 8
    """Rounds of each workload; in each, every candidate runs once. Prompts beyond 1,024 ids get half of them.
    """
    new_tokens: int = 64
    """Tokens timed in a decoding trial."""
    depth: tuple[int, ...] = (0,)
    """Cached positions before the timed tokens."""
    prefill: tuple[int, ...] = (128, 512)
    """Lengths of prompts."""
    batch: tuple[int, ...] = ()
    """Numbers of sequences that decode together, 2 to 8."""
    context_tokens: int | None = None
    """Context of every candidate; default: the model's, of llama.cpp at most 8,192."""
    beside: int = 0
    """So many other programs do nothing but compute meanwhile, as on a machine that is in use."""

    def workloads(self) -> list[Workload]:
        sizes = {"decode": self.depth, "prefill": self.prefill, "batch": self.batch}
        return [Workload(kind, size) for kind, values in sizes.items() for size in values]

    def first(self) -> dict[str, str]:
        """What a candidate of ours has unless its name says otherwise."""
        return {key: getattr(self, key)[0] for key in OWN}

    def names(self) -> list[str]:
        """Our engine and the baselines; ValueError for an option that cannot be measured."""
        check_at_least(self, threads=1, pairs=1, new_tokens=1, beside=0)
        if self.context_tokens is not None:
            check_at_least(self, context_tokens=1)
        if not self.workloads() or not all(getattr(self, key) for key in OWN):
            raise ValueError(
                f"nothing to measure: give at least one of depth, prefill and batch, and one each of {', '.join(OWN)}"
            )
        if self.model is not None and not self.model.is_file():
            raise ValueError(f"model = {self.model} is not a file; give a GGUF file")
        baselines = [name.strip() for name in self.against.split(",") if name.strip()]
        for name in baselines:
            if name not in (known := INSTALL.keys() - {OURS}):
                raise ValueError(f"unknown baseline {name!r}; choose from {sorted(known)}")
        first, ours = self.first(), []
        for values in itertools.product(*(getattr(self, key) for key in OWN)):
            own = [f"{key}={value}" for key, value in zip(OWN, values, strict=True) if value != first[key]]
            ours.append(" ".join([OURS, *own]))
        return ours + [each for name in dict.fromkeys(baselines) for each in names_of(name, self.dtype)]

    def check_room(self, context: int) -> None:
        """ValueError where a workload does not fit the model's context."""
        for load in self.workloads():
            most = {"decode": context - self.new_tokens - 1, "prefill": context, "batch": 8}[load.kind]
            least = {"decode": 0, "prefill": 1, "batch": 2}[load.kind]
            if not least <= load.size <= most:
                raise ValueError(
                    f"{load.kind}: {load.size} is outside {least} to {most} (the context is {context})"
                )


def candidate(name: str, options: Options) -> Candidate:
    threads, source = str(options.threads), str(options.model or options.flavor)
    own = json.dumps(options.first())
    sizes = threads, str(options.context_tokens or "")
    command = ["-m", "tools.bench.decode_candidates", name, source, options.dtype, own, *sizes]
    return Candidate(name, command, {"OMP_NUM_THREADS": threads}, SETTLE_S)


def measure(options: Options, console: Any) -> Result:
    """Every figure of the report. RuntimeError if our own engine does not start."""
    names, facts = options.names(), dict[str, Result]()
    if options.model is None and options.flavor in experts.FIELDS:
        if options.dtype != "gguf":
            raise ValueError(f"flavor = {options.flavor!r} is a GGUF file; give --dtype gguf")
        options = dataclasses.replace(options, model=experts.random_experts(options.flavor))
    if options.model is None:
        if options.dtype == "gguf":
            raise ValueError(
                f"dtype = 'gguf' takes a file as it is; give --model FILE.gguf, or --flavor {list(experts.FIELDS)}"
            )
        own = LaneformerConfig.from_flavor(options.flavor).max_position_embeddings
        options.check_room(options.context_tokens or own)
    candidates = {name: candidate(name, options) for name in names}
    try:
        for name in names:
            with console.status(f"starting {name}"):
                facts[name] = candidates[name].ask("facts")
            console.print(f"{name}: {', '.join(map(str, facts[name].values()))}", style="dim", markup=False)
        missing = {name: fact["missing"] for name, fact in facts.items() if "missing" in fact}
        if OURS in missing:
            raise RuntimeError(f"our own engine did not start: {missing[OURS]}")
        options.check_room(facts[OURS]["context_tokens"])
        present = {name: candidates[name] for name in names if name not in missing}
        with busy_programs(options.beside):
            found = [
                measured(load, options, present, facts[OURS]["vocab_size"], console)
                for load in options.workloads()
            ]
        settings = {name: each.ask("settings") for name, each in present.items()}
        bench = present[OURS].ask("bench")
    finally:
        for each in candidates.values():
            each.close()
    return {
        "model": str(options.model or options.flavor), "dtype": options.dtype, "threads": options.threads,
        "candidates": {name: {**facts[name], "settings": settings[name]} for name in present},
        "workloads": found, "bench": bench, "missing": missing,
    }  # fmt: skip


@contextlib.contextmanager
def busy_programs(number: int) -> Iterator[None]:
    """So many processes that only compute."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for program in running:
            program.kill()
            program.wait()


def measured(load: Workload, options: Options, candidates: Result, vocab_size: int, console: Any) -> Result:
    """One workload: its rounds, every candidate's speed, and our speed over each baseline's within a round."""
    rng = np.random.default_rng(load.size)

    def drawn() -> list[int]:
        return rng.integers(3, vocab_size, max(load.size, 1)).tolist()

    prompt, long = drawn(), load.kind == "prefill" and load.size > LONG_PROMPT
    count = math.ceil(options.pairs / 2) if long else options.pairs
    rounds: list[Result] = []
    for each in candidates.values():  # pages, clocks, the choice between ways to run
        trial(each, load, options, prompt)
    for order in alternate(candidates, count):
        if load.kind == "prefill":  # else the positions before the timed tokens stay cached
            prompt = drawn()
        figures, probes = Result(), [candidates[OURS].ask("probe")]
        for name in order:
            before = candidates[name].cpu_clocks()
            speed, bytes_per_token = trial(candidates[name], load, options, prompt)
            wall_s, own_s, busy_s = candidates[name].cpu_clocks() - before
            probes.append(candidates[OURS].ask("probe"))
            figures[name] = {
                "tokens_per_s": speed,
                "percent_of_probe": 100 * speed * bytes_per_token / (sum(probes[-2:]) / 2),
                "other_cpus": max(0.0, busy_s - own_s) / wall_s,
            }
        rounds.append({"order": order, "probes": probes, "figures": figures})
        speeds = ", ".join(f"{name} {each['tokens_per_s']:.1f}" for name, each in figures.items())
        console.print(f"{load}, round {len(rounds)} of {count}: {speeds}")
    baselines = [name for name in candidates if not name.startswith(OURS)]
    return {
        "kind": load.kind, "size": load.size, "name": str(load), "rounds": rounds,
        "candidates": {n: {key: spread([r["figures"][n][key] for r in rounds]) for key in FIGURES} for n in candidates},
        "ratios": [ratio(rounds, n, b) for n in candidates if n.startswith(OURS) for b in baselines]
                  + [ratio(rounds, first, n) for n in candidates if (first := plainer(n)) != n],
    }  # fmt: skip


def trial(candidate: Any, load: Workload, options: Options, prompt: list[int]) -> tuple[float, float]:
    """Tokens/s, and the bytes that a token reads."""
    if load.kind == "prefill":
        return candidate.ask("prefill", prompt=prompt), 0
    wanted: Result = {"prompt": prompt} if load.kind == "decode" else {"sequences": load.size}
    answer = candidate.ask(load.kind, new_tokens=options.new_tokens, **wanted)
    return answer["tokens_per_s"], answer["bytes_per_token"]


def plainer(name: str) -> str:
    """The candidate of the same arithmetic on the first instruction set, with the first keys and values."""
    return re.sub(r" (isa|kv_dtype)=\w+", "", name)


def ratio(rounds: list[Result], ours: str, baseline: str) -> Result:
    """Our speed over the baseline's within each round."""
    ratios = [r["figures"][ours]["tokens_per_s"] / r["figures"][baseline]["tokens_per_s"] for r in rounds]
    ahead = sum(value > 1 for value in ratios)
    return {"ours": ours, "over": baseline, "median": float(np.median(ratios)), "min": min(ratios), "max": max(ratios),
            "ahead": ahead, "pairs": len(ratios)}  # fmt: skip


# --- the report
# ---------------------------------------------------------------------------------------------------


def section(options: Options, result: Result) -> tuple[str, str]:
    bench, found = result["bench"], result["candidates"]
    probes = spread([probe for load in result["workloads"] for r in load["rounds"] for probe in r["probes"]])
    listed = [
        f"- {name}: " + "; ".join(dict.fromkeys(filter(None, (c["version"], c.get("about"), c["settings"]))))
        for name, c in found.items()
    ]
    listed += [f"- {name}: left out, {reason}" for name, reason in result["missing"].items()]
    parts = [
        "\n".join(listed),
        f"Probe: {probes['median'] / 1e9:.1f} GB/s (p10 {probes['p10'] / 1e9:.1f}, p90 {probes['p90'] / 1e9:.1f}). "
        f"{options.pairs} rounds of {options.new_tokens} tokens each.",
        speeds(result["workloads"]),
        ratios(result["workloads"]),
        f"`laneformer bench` right after, with its probe between its segments: {bench['tokens_per_s']:.1f} tokens/s, "
        f"{bench['percent_of_probe']:.0f}% of {bench['probe_bytes_per_s'] / 1e9:.1f} GB/s "
        f"(p10 {bench['percent_of_probe_p10']:.0f}%, p90 {bench['percent_of_probe_p90']:.0f}%); "
        f"{1e3 * bench['token_s_p50']:.1f} ms per token, p99 {1e3 * bench['token_s_p99']:.1f} ms.",
    ]
    if share := bench.get("percent_of_product_probe"):
        parts[-1] += f" Its prompts: {share:.0f}% of its probe of matrix products."
    name = f"`{options.flavor}`" if options.model is None else options.model.name
    beside = f", beside {options.beside} busy programs" if options.beside else ""
    return f"{name} in {options.dtype}, {options.threads} threads{beside}", "\n\n".join(filter(None, parts))


def speeds(workloads: list[Result]) -> str:
    """A row for each workload and candidate; decoding also in percent of the probe, a prompt in seconds."""
    columns = ["workload", "", "tokens/s", "p10", "p90", "% of probe", "p10", "p90", "first token, s",
               "other CPUs"]  # fmt: skip
    rows = []
    for load in workloads:
        for name, c in load["candidates"].items():
            speed = [f"{value:.1f}" for value in c["tokens_per_s"].values()]
            percent = [
                f"{value:.0f}" if load["kind"] == "decode" else "" for value in c["percent_of_probe"].values()
            ]
            first = f"{load['size'] / c['tokens_per_s']['median']:.3g}" if load["kind"] == "prefill" else ""
            others = f"{c['other_cpus']['median']:.2f}"
            rows.append([load["name"], name, *speed, *percent, first, others])
    return table(columns, rows)


def ratios(workloads: list[Result]) -> str:
    columns = ["workload", "ours", "over", "median", "min", "max", "ahead in"]
    rows = [
        [load["name"], r["ours"], r["over"],
         *(f"{r[k]:.2f}" for k in ("median", "min", "max")), f"{r['ahead']} of {r['pairs']}"]
        for load in workloads for r in load["ratios"]
    ]  # fmt: skip
    return table(columns, rows) if rows else ""
