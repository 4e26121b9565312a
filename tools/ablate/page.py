"""The benchmark page: a section for the ablation and one for each diagnosis, from the figures alone."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from records.files import code_version, write_atomically
from tools.bench.harness import ROOT, machine_facts, version
from tools.markdown import table

from .figure import words
from .report import Result, Row, detectable, noise_floor, paired, pooled_deviation, together

FILE_START = """# What the delay is worth

Validation loss of small models that differ in their joins alone, against ordinary tensor parallelism (delay 0): the
same tokens in the same order, the same initial weights, paired by seed. The sections are written by their commands from
what these measured; running a command again replaces its section. The models and the update table:
[architecture](../architecture.md); the variants: configs/ablation.toml and tools/ablate/variants.py.
"""
LIMITS = """What it does not say:

- These models are small and see few tokens; nothing here shows that a difference, or its absence, holds at 2B.
- A variant has at most {seeds} pairs of runs, so intervals are wide: "not told apart from zero" is not parity. {power}
- An interval holds for one comparison. Among {compared} comparisons at 95%, about {wrong:.1f} exclude zero by chance.
- Learning rates are on a coarse grid, and the least mean of a few is a little optimistic for everyone. Where the best
  rate is at the edge of the sweep, a better one may lie outside; where only one was tried, others may do better.
- At this length much of a difference is speed of optimisation, not what a model can learn: variants whose partial
  outputs are scaled up (never reduced, Desync) take larger steps from the same start.
- The number of lanes rearranges initial weights: other numbers of lanes than the baseline's are paired by batches and
  by the numbers drawn, not by function."""


def ablation_section(results: Sequence[Result], baseline: str, figure: Path, page: Path | None) -> str:
    """Facts, table, figure and what it says, as Markdown."""
    rows = paired(results, baseline)
    days = sorted(time.strftime("%Y-%m-%d %H:%M", time.gmtime(r["time"])) for r in results)
    commits = sorted({r.get("commit", "not recorded") for r in results})
    data = sorted({r.get("data", "not recorded")[:12] for r in results})
    training, hours = results[-1]["training"], sum(r["seconds"] for r in results) / 3600
    branches = (
        f"Only {words(baseline)} is trained whole: each other run leaves it after {training['branch_at']:.0%} of "
        "the steps, with its weights, moments and place in the data. "
        if training.get("branch_at")
        else ""
    )
    blocks = [
        heading("Ablation", "python -m tools.ablate"),
        f"{len(results)} runs, {days[0]} to {days[-1]} UTC, {hours:.1f} hours of one thread; commit of the runs: "
        f"{', '.join(commits)}. A run: {training['steps']} steps of {training['batch_sequences']} windows of "
        f"{training['seq_len']} tokens ({rows[0]['tokens']:,} tokens) on {training['device']}"
        f"{', bf16 products' if training.get('bf16') else ', float32'}; data: {', '.join(data)}. "
        f"{branches}Each run is a line of the .jsonl beside this page; as OUT/results.jsonl, it is what the command "
        "goes on from. Without --report, the command trains what is missing.",
        f"Losses in nats a token, means over seeds. rates: how many the variant and {words(baseline)} both ran on "
        "all seeds; rate: the variant's best of these, `edge` where it is the least or the largest; difference: to "
        f"{words(baseline)} at its own best of these; ±: half of its 95% t interval; s.d.: of the paired differences.",
    ]
    for size in dict.fromkeys(row["size"] for row in rows):
        own = [row for row in rows if row["size"] == size]
        runs = [r for r in results if r["size"] == size]
        blocks += [f"### {own[0]['parameters'] / 1e6:.3g}M parameters (`{size}`)", rows_table(own)]
        blocks += ["\n".join([*conclusions(own), *in_one_analysis(runs, baseline)])]
    blocks += [
        image(figure, page, "Paired differences to delay 0, with their 95% intervals"),
        limits(rows),
    ]
    return "\n\n".join(blocks)


def rows_table(rows: Sequence[Row]) -> str:
    def signed(value: float) -> str:
        return "-" if math.isnan(value) else f"{value:+.4f}"

    columns = ("variant", "rates", "rate", "seeds", "loss", "difference", "±", "s.d.", "")
    lines = [
        (
            words(row["variant"]), row["rates"], f"{row['learning_rate']:g}{' edge' * row['edge_of_sweep']}",
            row["seeds"], f"{row['valid_loss']:.4f}", *("-" if row["role"] == "baseline" else cell for cell in (
                signed(row["difference"]), signed(row["half_width_95"])[1:], signed(row["deviation"])[1:])),
            row["role"] or verdict(row),
        )
        for row in rows
    ]  # fmt: skip
    return table(columns, lines)


def verdict(row: Row) -> str:
    """Of a compared variant: what its interval says."""
    if not math.isfinite(row["difference"]):
        return "diverged"
    if math.isnan(row["half_width_95"]):
        return "one seed"
    if abs(row["difference"]) <= row["half_width_95"]:
        return "not told apart from zero"
    return "worse" if row["difference"] > 0 else "better"


def conclusions(rows: Sequence[Row]) -> list[str]:
    """What one size says, in sentences that its rows decide."""
    compared = [row for row in rows if row["role"] is None]
    by_verdict = {name: [row for row in compared if verdict(row) == name] for name in map(verdict, compared)}
    lines = [
        f"- {name}: {'; '.join(worded(row) for row in found)}." for name, found in sorted(by_verdict.items())
    ]
    floor = noise_floor(rows)
    for row in (row for row in rows if row["role"] == "noise floor"):
        lines.append(
            f"- Noise floor: other initial weights alone move the mean by {row['difference']:+.4f}, up to {floor:.4f}."
        )
        beyond = ", ".join(words(row["variant"]) for row in compared if abs(row["difference"]) > floor)
        lines.append(f"- Differences beyond the noise floor: {beyond or 'none'}.")
    for row in (row for row in rows if row["role"] == "planted fault"):
        found = row["difference"] > floor and verdict(row) in ("worse", "one seed", "diverged")
        blind = "" if found else " Nothing that costs as little can be told apart here."
        lines.append(f"- The planted fault is {'found' if found else 'NOT FOUND'}: {worded(row)}.{blind}")
    return lines


def in_one_analysis(results: Sequence[Result], baseline: str) -> list[str]:
    """What all variants of one size say together."""
    joint = together(results, baseline)
    if joint is None or len(joint["differences"]) < 2:  # of one, it is the paired interval
        return []
    halves = [joint["half_width_95"], joint["half_width_95_of_all"]]
    apart = [
        ", ".join(f"{words(name)} {by:+.4f}" for name, by in joint["differences"].items() if abs(by) > half)
        or "none"
        for half in halves
    ]
    dunnett = ", ".join(f"{words(name)} p = {p:.3f}" for name, p in joint["dunnett"].items())
    return [
        f"- All variants but the faults in one analysis of variance (rate {joint['learning_rate']:g}, {joint['seeds']} "
        f"seeds), which takes runs to scatter alike whatever their joins ({joint['deviation']:.4f} a run, "
        f"{joint['degrees']} degrees of freedom): one difference has an interval of ± {halves[0]:.4f}; beyond it: "
        f"{apart[0]}. All {len(joint['differences'])} at once have ± {halves[1]:.4f} (Bonferroni); beyond it: "
        f"{apart[1]}. Dunnett's test, not paired: {dunnett}."
    ]


def worded(row: Row) -> str:
    half = "" if math.isnan(row["half_width_95"]) else f" ± {row['half_width_95']:.4f}"
    return f"{words(row['variant'])} {row['difference']:+.4f}{half}"


def limits(rows: Sequence[Row]) -> str:
    compared, seeds = [row for row in rows if row["role"] is None], max(row["seeds"] for row in rows)
    deviation = pooled_deviation(rows)
    power = "Differences have no standard deviation yet, as each variant has one seed."
    if math.isfinite(deviation):
        found = ", ".join(
            f"{detectable(deviation, n):.3f} with {n}" for n in sorted({seeds, 5, 10}) if n >= seeds
        )
        power = (
            f"With the standard deviation of the paired differences, {deviation:.4f} nats (pooled over variants), a "
            f"test at 5% finds in four of five experiments a difference of {found} pairs."
        )
    return LIMITS.format(seeds=seeds, power=power, compared=len(compared), wrong=0.05 * len(compared))


def heading(title: str, command: str) -> str:
    """Title, command, machine and commit of whatever is being reported."""
    machine = machine_facts()
    return (
        f"## {title}\n\n    {command} {shlex.join(sys.argv[1:])}\n\n{time.strftime('%Y-%m-%d', time.gmtime())}; "
        f"{machine['cpu']}, {machine['cpus']} CPUs, {machine['memory']}; {machine['system']}, "
        f"torch {version('torch')}; commit {code_version(ROOT)}."
    )


def image(figure: Path, page: Path | None, caption: str) -> str:
    return f"![{caption}]({os.path.relpath(figure, page.parent if page else Path())})"


def put_section(page: Path, section: str) -> None:
    """Replace the page's section of the same title, or append it."""
    text = page.read_text(encoding="utf-8") if page.exists() else FILE_START
    title, others = section.partition("\n")[0], re.split(r"\n+(?=## )", text.rstrip())
    kept: list[Any] = [section if other.partition("\n")[0] == title else other for other in others]
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(page, "\n\n".join(kept if section in kept else [*kept, section]) + "\n")
