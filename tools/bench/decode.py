"""Decode speed against llama.cpp and Transformers: paired runs, turn by turn, with the memory's own speed beside them.

    python -m tools.bench.decode --against llamacpp,transformers --out docs/benchmarks/2026-11-21-cpu-decode.md

The read bandwidth of a shared machine moves within seconds, so a speed is never reported alone. In every round each
contestant decodes once, in alternating order, and a read probe runs before and after each turn. A contestant's percent
is its weight bytes per second over the probes on both sides of its turn; ratios are taken within a round. Contestants
are processes that stay alive and asleep while others run (tools.bench.decode_rivals). Bytes are weights, without the cache.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import rich.table
import tyro
from rich.console import Console
from rich.markup import escape

from laneformer import LaneformerConfig
from records.files import code_version, write_atomically
from tools.bench.decode_rivals import CONTESTANTS, ROOT, ContestantProcess, Dtype

OURS = "laneformer"
PREFILL_LENGTHS = (128, 512)
PREFILL_ROUNDS = 3
SPREAD = ("median", "p10", "p90")
FILE_START = """# Decode speed on CPU, in paired runs

Each section is one run of its command. Random weights of one shape in 16 bits, one request, greedy. A round measures
every contestant once, in alternating order, each in a process of its own while the others sleep; a read probe (that of
`laneformer bench`: the same threads, a sequential read of a buffer far larger than the caches) runs before and after
every turn. "% of probe": weight bytes read per second over the mean of the two probes around the turn; keys and values
are not counted. "Other CPUs": CPU time that other processes used during the turns, per second; near 0 on a quiet
machine. Ratios are taken within a round, since a shared machine changes; on a busy one they also say who copes better
with neighbours."""
Result = dict[str, Any]


@dataclass
class Options:
    """Measure against rivals and print a table; the last line of stdout is JSON."""

    against: str = "llamacpp,transformers"
    """Rivals, with commas between; what one lacks is said, and the others still run."""
    flavor: Literal["2b", "300m", "tiny"] = "300m"
    """The shape."""
    dtype: Dtype = "bf16"
    """Element type of the weights, the same for all."""
    threads: int = 2
    """Threads of every contestant and of the probe."""
    pairs: int = 8
    """Rounds; in each, every contestant decodes once."""
    new_tokens: int = 64
    """Tokens timed in a turn."""
    depth: int = 0
    """Cached positions before the timed tokens."""
    json: bool = False
    """Print nothing but the JSON line."""
    out: Path | None = None
    """Markdown file to append a dated section to."""

    @property
    def config(self) -> LaneformerConfig:
        return LaneformerConfig.from_flavor(self.flavor)

    def check(self) -> None:
        """ValueError for a value that cannot be measured."""
        for name in ("threads", "pairs", "new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        most = self.config.max_position_embeddings - self.new_tokens - 1
        if not 0 <= self.depth <= most:
            raise ValueError(f"depth = {self.depth} is outside 0 to {most} (the context less the new tokens)")

    def names(self) -> list[str]:
        """Ours and the rivals; ValueError names what is unknown."""
        rivals = [name.strip() for name in self.against.split(",") if name.strip()]
        for name in rivals:
            if name not in CONTESTANTS or name == OURS:
                raise ValueError(f"unknown rival {name!r}; choose from {sorted(set(CONTESTANTS) - {OURS})}")
        return [OURS, *dict.fromkeys(rivals)]


def main(arguments: list[str] | None = None) -> None:
    options = tyro.cli(Options, args=arguments, description=__doc__)
    console = Console(stderr=True, quiet=options.json, width=None if sys.stderr.isatty() else 120)
    try:
        options.check()
        result = compare(options, options.names(), console)
    except (ValueError, RuntimeError) as error:
        print(f"bench_decode: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    command = ["python", "-m", "tools.bench.decode", *(sys.argv[1:] if arguments is None else arguments)]
    result["command"] = shlex.join(command)
    console.print(rich_table(f"{options.flavor} {options.dtype}", *speeds(result)))
    console.print(rich_table("within a round", *ratios(result)))
    if options.out is not None:
        append_section(options.out, markdown(result))
        console.print(f"appended to {options.out}")
    print(json.dumps(result))


def compare(options: Options, names: list[str], console: Console) -> Result:
    """Start everyone, measure, stop everyone; every figure of the report."""
    started, load_before = datetime.datetime.now(datetime.UTC), os.getloadavg()[0]
    running: dict[str, ContestantProcess] = {}
    missing: dict[str, str] = {}
    try:
        start(options, names, running, missing, console)
        rounds = decode_rounds(options, running, console)
        prefill = prefill_rounds(options, running, console)
        with console.status("laneformer bench"):
            bench = running[OURS].ask("bench", flavor=options.flavor, threads=options.threads)
        facts = {name: process.facts for name, process in running.items()}
    finally:
        for process in running.values():
            process.close()
    return {
        "date": started.strftime("%Y-%m-%d %H:%M UTC"),
        "seconds": round((datetime.datetime.now(datetime.UTC) - started).total_seconds()),
        "commit": code_version(ROOT),
        "machine": machine_facts(),
        "load_average": {"before": load_before, "after": os.getloadavg()[0]},
        **{name: getattr(options, name) for name in ("flavor", "dtype", "threads", "new_tokens", "depth")},
        "contestants": {name: summary(name, facts[name], rounds, prefill[name]) for name in facts},
        "ratios": {name: ratio(rounds, name) for name in facts if name != OURS},
        "probe_bytes_per_s": spread([probe for r in rounds for probe in r["probes"]]),
        "bench": bench,
        "rounds": rounds,
        "missing": missing,
    }


def start(
    options: Options,
    names: list[str],
    running: dict[str, ContestantProcess],
    missing: dict[str, str],
    console: Console,
) -> None:
    """Fill `running` with what starts and `missing` with what a rival lacks; RuntimeError when ours does not start."""
    for name in names:
        with console.status(f"starting {name}"):
            process = ContestantProcess(name, options.flavor, options.dtype, options.threads)
        if process.missing is None:
            running[name] = process
            console.print(f"{name}: {process.facts['version']}; {process.facts['settings']}", style="dim")
            continue
        process.close()
        missing[name] = process.missing
        console.print(f"[yellow]{name} is left out:[/] {escape(process.missing)}", soft_wrap=True)
    if OURS not in running:
        raise RuntimeError(f"our own engine did not start: {missing[OURS]}")


def decode_rounds(options: Options, running: dict[str, ContestantProcess], console: Console) -> list[Result]:
    """One dict a round: the order, tokens/s and percent of the probe by name, and the probes in between."""
    rng = np.random.default_rng(0)

    def probe() -> float:
        return running[OURS].ask("bench", flavor="tiny", threads=options.threads)["probe_bytes_per_s"]

    rounds = []
    for process in running.values():
        process.ask("decode", prompt=[5], new_tokens=options.new_tokens)  # warm: pages, clocks
    for index in range(options.pairs):
        order = list(running) if index % 2 == 0 else list(running)[::-1]
        prompt = rng.integers(3, options.config.vocab_size, max(options.depth, 1)).tolist()
        probes, speed, percent, others = [probe()], {}, {}, {}
        for name in order:
            before = running[name].cpu_clocks()
            speed[name] = running[name].ask("decode", prompt=prompt, new_tokens=options.new_tokens)
            wall_s, own_s, busy_s = (b - a for a, b in zip(before, running[name].cpu_clocks(), strict=True))
            others[name] = max(0.0, busy_s - own_s) / wall_s
            probes.append(probe())
            bytes_per_s = speed[name] * running[name].facts["weight_bytes_per_token"]
            percent[name] = 100 * bytes_per_s / (sum(probes[-2:]) / 2)
        values = {"tokens_per_s": speed, "percent_of_probe": percent, "other_cpus": others}
        rounds.append({"order": order, **values, "probes": probes})
        said = ", ".join(f"{name} {speed[name]:.1f} ({percent[name]:.0f}%)" for name in running)
        console.print(f"round {index + 1} of {options.pairs}: {said}; probe {np.mean(probes) / 1e9:.1f} GB/s")
    return rounds


def prefill_rounds(
    options: Options, running: dict[str, ContestantProcess], console: Console
) -> dict[str, dict[str, float]]:
    """Prompt tokens/s by contestant and prompt length: medians over rounds."""
    rng = np.random.default_rng(1)  # fresh prompts every time: a prefix kept from the last one must not count as speed
    lengths = [length for length in PREFILL_LENGTHS if length < options.config.max_position_embeddings]
    found: dict[str, dict[str, list[float]]] = {name: {str(n): [] for n in lengths} for name in running}
    for index in range(PREFILL_ROUNDS):
        for length in lengths:
            for name in list(running) if index % 2 == 0 else list(running)[::-1]:
                prompt = rng.integers(3, options.config.vocab_size, length).tolist()
                with console.status(f"prefill of {length}, {name}, {index + 1} of {PREFILL_ROUNDS}"):
                    found[name][str(length)].append(running[name].ask("prefill", prompt=prompt))
    return {name: {n: float(np.median(speed)) for n, speed in by.items()} for name, by in found.items()}


def spread(values: list[float]) -> dict[str, float]:
    return dict(zip(SPREAD, np.percentile(values, (50, 10, 90)).tolist(), strict=True))


def summary(name: str, facts: Result, rounds: list[Result], prefill: dict[str, float]) -> Result:
    return {
        **facts,
        **{k: spread([r[k][name] for r in rounds]) for k in ("tokens_per_s", "percent_of_probe", "other_cpus")},
        "prefill_tokens_per_s": prefill,
    }


def ratio(rounds: list[Result], rival: str) -> Result:
    """Ours over theirs within each round."""
    ratios = [r["tokens_per_s"][OURS] / r["tokens_per_s"][rival] for r in rounds]
    ahead = sum(value > 1 for value in ratios)
    return {
        "median": float(np.median(ratios)),
        "min": min(ratios),
        "max": max(ratios),
        "ahead": ahead,
        "pairs": len(ratios),
    }


def machine_facts() -> dict[str, str]:
    """What lscpu says about the machine, and its memory; empty values where the system does not tell."""
    lines = subprocess.run(["lscpu"], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stdout
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines.splitlines())}
    flags = said.get("Flags", "").split()
    wanted = [flag for flag in ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": said.get("Model name", platform.processor()),
        "cpus": said.get("CPU(s)", str(os.cpu_count())),
        "caches": ", ".join(f"{level} {said[f'{level} cache']}" for level in ("L2", "L3") if f"{level} cache" in said),
        "instructions": " ".join(wanted),
        "memory": f"{pages / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
    }


# --- the report --------------------------------------------------------------------------------------------------

Table = tuple[list[str], list[list[str]]]  # columns and rows


def speeds(result: Result) -> Table:
    lengths = result["contestants"][OURS]["prefill_tokens_per_s"]
    columns = ["", "tokens/s", "p10", "p90", "MB/token", "% of probe", "p10", "p90", "other CPUs"]
    columns += [f"prefill {length}" for length in lengths]
    rows = []
    for name, c in result["contestants"].items():
        speed = [f"{c['tokens_per_s'][k]:.1f}" for k in SPREAD]
        percent = [f"{c['percent_of_probe'][k]:.0f}" for k in SPREAD]
        others = f"{c['other_cpus']['median']:.2f}"
        prefill = [f"{value:.0f}" for value in c["prefill_tokens_per_s"].values()]
        rows.append([name, *speed, f"{c['weight_bytes_per_token'] / 1e6:.1f}", *percent, others, *prefill])
    return columns, rows


def ratios(result: Result) -> Table:
    rows = [
        [name, *(f"{r[k]:.2f}" for k in ("median", "min", "max")), f"{r['ahead']} of {r['pairs']}"]
        for name, r in result["ratios"].items()
    ]
    return ["ours over", "median", "min", "max", "ahead in"], rows


def every_round(result: Result) -> Table:
    names = list(result["contestants"])
    rows = []
    for index, r in enumerate(result["rounds"], 1):
        cells = [f"{r['tokens_per_s'][name]:.1f} ({r['percent_of_probe'][name]:.0f}%)" for name in names]
        rows.append([str(index), *cells, " ".join(f"{probe / 1e9:.1f}" for probe in r["probes"])])
    return ["round", *names, "probes, GB/s"], rows


def rich_table(title: str, columns: list[str], rows: list[list[str]]) -> rich.table.Table:
    table = rich.table.Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def markdown(result: Result) -> str:
    """One section of a benchmark file; every figure in it is of this run."""
    machine, load, bench, probe = (result[k] for k in ("machine", "load_average", "bench", "probe_bytes_per_s"))
    shape = f"`{result['flavor']}` in {result['dtype']}, {result['threads']} threads, depth {result['depth']}"
    who = [f"- {name}: {c['version']}; {c['settings']}" for name, c in result["contestants"].items()]
    who += [f"- {name}: left out, {reason}" for name, reason in result["missing"].items()]
    interleaved = (
        f"`laneformer bench` right after, its probe between stretches of tokens: {bench['tokens_per_s']:.1f} tokens/s, "
        f"{bench['percent_of_probe']:.0f}% of {bench['probe_bytes_per_s'] / 1e9:.1f} GB/s "
        f"(p10 {bench['percent_of_probe_p10']:.0f}%, p90 {bench['percent_of_probe_p90']:.0f}%); "
        f"{1e3 * bench['token_s_p50']:.1f} ms a token, p99 {1e3 * bench['token_s_p99']:.1f} ms."
    )
    parts = [
        f"## {result['date']}: {shape}",
        f"    {result['command']}",
        f"{machine['cpu']}, {machine['cpus']} CPUs ({machine['instructions']}; {machine['caches']}), "
        f"{machine['memory']}; {machine['system']}. Commit {result['commit']}. "
        f"Load average {load['before']:.1f} before, {load['after']:.1f} after; {result['seconds']} s in all.",
        "\n".join(who),
        f"Probe: {probe['median'] / 1e9:.1f} GB/s (p10 {probe['p10'] / 1e9:.1f}, p90 {probe['p90'] / 1e9:.1f}). "
        f"{len(result['rounds'])} rounds of {result['new_tokens']} tokens each; prefill in tokens/s.",
        *(markdown_table(*table) for table in (speeds(result), ratios(result))),
        interleaved,
        markdown_table(*every_round(result)),
    ]
    return "\n\n".join(parts) + "\n"


def append_section(path: Path, section: str) -> None:
    """Add a section to a benchmark file, which starts with a title and what the columns mean."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_text(encoding="utf-8") if path.exists() else FILE_START
    write_atomically(path, f"{before.rstrip()}\n\n{section}")


if __name__ == "__main__":
    main()
