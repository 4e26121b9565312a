"""Decode and prefill speed on the CPU, alternating with other engines.

    python -m tools.bench decode --against llamacpp,ik,openvino,transformers --out PAGE.md
    python -m tools.bench decode --model MODEL.gguf --dtype int4 --depth 0 2000 --prefill 128 4000

A shared machine's read bandwidth changes within seconds, so read probes run in between; FILE_START
describes trials, probes and ratios.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from laneformer import LaneformerConfig
from records.command import Count, Natural
from tools.bench import harness
from tools.bench.decode_candidates import INSTALL, OURS, Dtype, load_candidate, names_of
from tools.bench.harness import Candidate, Result, alternate, spread
from tools.markdown import records

SETTLE_S = 0.3  # OpenMP threads spin for a while after their last work before they sleep
KINDS = {"decode": "decode at depth", "prefill": "prompt of"}
FILE_START = """# Decode speed on CPU, in paired runs

Each section is one run of its command. One model's weights in the same number of bits for everyone, one request,
greedy. A round measures every candidate once, in alternating order, each in a process of its own while the others
sleep; a read probe (that of `laneformer bench`: the same threads, a sequential read of a buffer far larger than the
caches) runs before and after every trial. "% of probe": bytes of weights, keys and values read per second over the mean
of the two probes around the trial. Ratios are taken within a round, since a shared machine changes. A baseline with
several ways to run (mapped file or not, flash attention or not) takes the fastest one for each workload, found by
trials of that workload."""


@dataclass(frozen=True)
class Workload:
    """What is timed: tokens after `size` cached positions, or a prompt of `size` ids."""

    kind: str
    size: int

    def __str__(self) -> str:
        return f"{KINDS[self.kind]} {self.size}"


@dataclass(kw_only=True)
class Options(harness.Options):
    """Speed on the CPU, alternating with other engines; the last line of stdout is JSON."""

    against: str = "llamacpp,transformers"
    """Comma-separated baselines; one that is not installed is reported as such, and the others still run."""
    flavor: Literal["2b", "300m", "tiny"] = "300m"
    """Shape of the model, with random weights."""
    model: Path | None = None
    """GGUF file of a Llama-family model instead; except for 16-bit ones, converted to bf16 for all first."""
    dtype: Dtype = "bf16"
    """Weight type of every candidate; llama.cpp: Q8_0 for int8, Q4_0 and Q4_K_M for int4; gguf: the file as it is."""
    ours: tuple[str, ...] = ()
    """Engine options of further candidates, each compared with the default one.
    `--ours isa=avx2 math=exact,kv_dtype=int8` adds two.
    """
    threads: Count = 2
    """Threads of every candidate and of the probe."""
    pairs: Count = 8
    """Rounds of each workload; in each, every candidate runs once."""
    new_tokens: Count = 64
    """Tokens timed in a decoding trial."""
    depth: tuple[Natural, ...] = (0,)
    """Cached positions before the timed tokens."""
    prefill: tuple[Count, ...] = (128, 512)
    """Lengths of prompts."""
    context_tokens: Count | None = None
    """Context of every candidate; default: the model's, of llama.cpp at most 8,192."""

    def workloads(self) -> list[Workload]:
        decodes = [Workload("decode", size) for size in self.depth]
        return decodes + [Workload("prefill", size) for size in self.prefill]

    def longest(self) -> int:
        """Positions that the workloads need."""
        return max(*self.prefill, 0, *(depth + 1 + self.new_tokens for depth in self.depth))

    def names(self) -> list[str]:
        """Return our engine and the baselines; ValueError for an option that cannot be measured."""
        if not self.workloads():
            raise ValueError("nothing to measure: give at least one depth or prefill")
        if self.model is None and self.dtype == "gguf":
            raise ValueError("dtype = 'gguf' takes a file as it is; give --model FILE.gguf")
        if self.model is not None and not self.model.is_file():
            raise ValueError(f"model = {self.model} is not a file; give a GGUF file")
        for own in self.ours:
            if not re.fullmatch(r"\w+=\w+(,\w+=\w+)*", own):
                raise ValueError(f"ours: {own!r} is not OPTION=VALUE,...")
        baselines = [name.strip() for name in self.against.split(",") if name.strip()]
        for name in baselines:
            if name not in INSTALL:
                raise ValueError(f"unknown baseline {name!r}; choose from {sorted(INSTALL)}")
        ours = [OURS, *(f"{OURS} {own}" for own in self.ours)]
        return ours + [each for name in baselines for each in names_of(name, self.dtype)]


def candidate(name: str, options: Options) -> Candidate:
    longer = {"max_position_embeddings": options.context_tokens} if options.context_tokens else {}
    source = options.model or LaneformerConfig.from_flavor(options.flavor, **longer)
    make = functools.partial(
        load_candidate, name, source, options.dtype, options.threads, options.context_tokens
    )
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # which the candidate's process inherits
    return Candidate(name, make, SETTLE_S)


def measure(options: Options, console: Any) -> Result:
    """Return every figure of the report; RuntimeError if our own engine does not start."""
    candidates = {name: candidate(name, options) for name in options.names()}
    facts: dict[str, Result] = {}
    try:
        for name, process in candidates.items():
            with console.status(f"starting {name}"):
                facts[name] = process.ask("facts")
            console.print(
                f"{name}: {', '.join(map(str, facts[name].values()))}", style="dim", markup=False
            )
        missing = {name: fact["missing"] for name, fact in facts.items() if "missing" in fact}
        if OURS in missing:
            raise RuntimeError(f"our own engine did not start: {missing[OURS]}")
        context = facts[OURS]["context_tokens"]
        if (longest := options.longest()) > context:
            raise ValueError(f"the workloads need {longest} positions, the context has {context}")
        present = {name: process for name, process in candidates.items() if name not in missing}
        vocab_size = facts[OURS]["vocab_size"]
        workloads = [
            measure_workload(workload, options, present, vocab_size, console)
            for workload in options.workloads()
        ]
        # again, with the ways that were taken
        facts = {name: process.ask("facts") for name, process in present.items()}
    finally:
        for process in candidates.values():
            process.close()
    return {
        "candidates": facts,
        "workloads": workloads,
        "missing": missing,
    }


def measure_workload(
    load: Workload, options: Options, candidates: Result, vocab_size: int, console: Any
) -> Result:
    """Return a workload's rounds, a row for each candidate, and our speed over each other's."""
    rng = np.random.default_rng(load.size)

    def draw_prompt() -> list[int]:
        return rng.integers(3, vocab_size, max(load.size, 1)).tolist()

    prompt, length = (
        draw_prompt(),
        {"new_tokens": options.new_tokens} if load.kind == "decode" else {},
    )
    for process in candidates.values():  # pages, clocks, the choice between ways to run
        process.ask(load.kind, prompt=prompt, **length)
    rounds: list[Result] = []
    for order in alternate(candidates, options.pairs):
        if load.kind == "prefill":  # else the positions before the timed tokens stay cached
            prompt = draw_prompt()
        speeds, percents, probes = Result(), Result(), [candidates[OURS].ask("probe")]
        for name in order:
            speeds[name], read = candidates[name].ask(load.kind, prompt=prompt, **length)
            probes.append(candidates[OURS].ask("probe"))
            percents[name] = 100 * speeds[name] * read / (sum(probes[-2:]) / 2)
        rounds.append(
            {"order": order, "probes": probes, "tokens_per_s": speeds, "percent_of_probe": percents}
        )
        words = ", ".join(f"{name} {speed:.1f}" for name, speed in speeds.items())
        console.print(f"{load}, round {len(rounds)} of {options.pairs}: {words}")
    ours = [name for name in candidates if name.startswith(OURS)]
    others = [name for name in candidates if name not in ours]
    pairs = [*itertools.product(ours, others), *((OURS, other) for other in ours[1:])]
    return {
        "rounds": rounds,
        "rows": [row_of(name, load, rounds) for name in candidates],
        "ratios": [{"workload": str(load), **ratio(rounds, *pair)} for pair in pairs],
    }


def row_of(name: str, load: Workload, rounds: list[Result]) -> Result:
    """Return a candidate's row; decoding also in percent of the probe, a prompt in seconds."""
    speed, percent = (
        spread([each[figure][name] for each in rounds])
        for figure in ("tokens_per_s", "percent_of_probe")
    )
    median, decodes = speed.pop("median"), load.kind == "decode"
    return {
        "workload": str(load),
        "candidate": name,
        "tokens_per_s": median,
        **speed,
        "percent_of_probe": percent["median"] if decodes else None,
        "first_token_s": None if decodes else load.size / median,
    }


def ratio(rounds: list[Result], ours: str, other: str) -> Result:
    """Return our speed over the other's within each round."""
    ratios = [each["tokens_per_s"][ours] / each["tokens_per_s"][other] for each in rounds]
    return {
        "ours": ours,
        "over": other,
        "median": float(np.median(ratios)),
        "min": min(ratios),
        "max": max(ratios),
        "ahead": f"{sum(value > 1 for value in ratios)} of {len(ratios)}",
    }


def section(options: Options, result: Result) -> tuple[str, str]:
    lines = [
        f"- {name}: {each['version']}; {each['about']}"
        for name, each in result["candidates"].items()
    ]
    lines += [f"- {name}: left out, {reason}" for name, reason in result["missing"].items()]
    workloads = result["workloads"]
    rounds = [each for load in workloads for each in load["rounds"]]
    probes = spread([probe for each in rounds for probe in each["probes"]])
    gb = {name: f"{value / 1e9:.1f}" for name, value in probes.items()}
    probe = f"Probe: {gb['median']} GB/s (p10 {gb['p10']}, p90 {gb['p90']})."
    parts = [
        "\n".join(lines),
        f"{probe} {options.pairs} rounds of {options.new_tokens} tokens each.",
    ]
    for name in ("rows", "ratios"):
        rows = [row for load in workloads for row in load[name]]
        parts += [records(rows)] if rows else []
    model = f"`{options.flavor}`" if options.model is None else options.model.name
    return f"{model} in {options.dtype}, {options.threads} threads", "\n\n".join(parts)
