"""What the rules of `layout` are worth: the damage of their layouts, measured on held-out text without training."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from laneformer import Laneformer
from records.files import write_atomically
from tools.ablate.report import interval
from tools.ablate.trainer import same_origin
from tools.markdown import table

from .damage import Row, keep, kept_rows
from .lanes import embedded, late_model, logits_of, run_late
from .layout import RULES, Layout, Module, Search, identity, laid_out, random_layout

SEEDS = 3  # of random layouts, and of the order in which a search goes over the modules
SEARCHED = RULES[2:]


def layout_of(
    rule: str, model: Laneformer, modules: Sequence[Module], delay: int, first: int, seed: int = 0
) -> tuple[Layout, Row]:
    """A rule's layout of a cut model with layers from `first` on late, and what the search says of it.

    modules: what `capture` took of the same model with one lane; none is needed without a search.
    """
    if rule not in RULES:
        raise ValueError(f"layout = {rule!r}; choose from {RULES}")
    if rule not in SEARCHED:
        layout = random_layout(model.config, first, seed) if rule == "random" else identity(model.config)
        return layout, {}
    search, began = Search(modules, model.config.num_lanes, delay, first, rule), time.perf_counter()
    found = search.run(seed)
    return search.layout(), {"estimates": found, "seconds": round(time.perf_counter() - began, 1)}


def kept_layout(path: Path, about: Row, made: Any) -> Layout:
    """The layout of a file, or what `made()` returns, which is written there. ValueError for one of another origin."""
    if not path.exists():
        own, told = made()
        write_atomically(path, json.dumps({"about": about, **told, "layout": own}) + "\n")
    found = json.loads(path.read_text(encoding="utf-8"))
    same_origin([found["about"]], about, path)
    layout: Layout = found["layout"]
    return layout


@torch.no_grad()
def compare(
    model: Laneformer,
    modules: Sequence[Module],
    parts: Sequence[Tensor],
    delays: Iterable[int],
    firsts: Iterable[int],
    path: Path,
    about: Row,
) -> list[Row]:
    """KL to the dense model and loss, nats a token, of every window and layout; a line of `path` each, those that
    it holds are kept.

    parts: batches of token ids (b, S + 1). Layers from `first` on are late by `delay`, flushed.
    """
    rows = kept_rows(path, about)
    done = {(row["rule"], row["seed"], row["delay"], row["first_late_layer"]) for row in rows}
    runs = [(rule, seed) for rule in RULES for seed in range(1 if rule == "identity" else SEEDS)]
    for first in firsts:
        ends = list(dense_ends(model, parts, first))
        for delay in delays:
            for rule, seed in runs:
                if (rule, seed, delay, first) in done:
                    continue
                with torch.enable_grad():
                    layout, told = layout_of(rule, model, modules, delay, first, seed)
                student = late_model(model.config, laid_out(model.state_dict(), layout))
                found = damage_of(student, ends, parts, delay, first)
                row = {"rule": rule, "seed": seed, "delay": delay, "first_late_layer": first, **found, **told}
                keep(rows, {**row, "about": about}, path)
    return rows


def dense_ends(model: Laneformer, parts: Sequence[Tensor], first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What layer `first` reads, and the dense model's logits, of each batch."""
    for h in embedded(model, parts):
        h, _ = run_late(model, h, 0, [0.0] * first, 1)
        upper = run_late(model, h, first, [0.0] * (len(model.layers) - first), 1)
        yield h, logits_of(model, upper, "dropped")


def damage_of(
    student: Laneformer,
    ends: Sequence[tuple[Tensor, Tensor]],
    parts: Sequence[Tensor],
    delay: int,
    first: int,
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"kl": [], "loss": [], "dense": []}
    for (h, dense), part in zip(ends, parts, strict=True):
        late = logits_of(
            student, run_late(student, h, first, [1.0] * (len(student.layers) - first), delay), "flushed"
        )
        guess, truth = late.log_softmax(-1), dense.log_softmax(-1)
        found["kl"] += F.kl_div(guess, truth, reduction="none", log_target=True).sum(-1).mean(1).tolist()
        for name, each in (("loss", guess), ("dense", truth)):
            found[name] += F.nll_loss(each.mT, part[:, 1:], reduction="none").mean(1).tolist()
    return found


def table_of(rows: Sequence[Row], bits: float) -> str:
    """Markdown. bits: a nat a token in bits per byte."""
    head = ("layout", "seed", "from layer", "delay", "KL, nats a token", "bits per byte", "estimate", "s")
    lines = []
    for row in sorted(rows, key=lambda row: (row["first_late_layer"], row["delay"])):
        kl, half, _ = interval(row["kl"])
        above = bits * (fmean(row["loss"]) - fmean(row["dense"]))
        found = row.get("estimates")
        searched = f"{found[0]:.3f} to {found[-1]:.3f}" if found else ""
        measured = f"{kl:.3f} ± {half:.3f}", f"{above:+.3f}", searched, row.get("seconds", "")
        lines.append((row["rule"], row["seed"], row["first_late_layer"], row["delay"], *measured))
    return table(head, lines)
