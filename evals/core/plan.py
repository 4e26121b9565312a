"""What CORE costs before anything runs: the tokens that a model must read, with shared prefixes and without."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from evals.core.prompts import Protocol, items
from evals.core.tasks import Bundle
from evals.scorer import TextEncoder, common_prefix


def plan(
    encoder: TextEncoder, max_length: int, bundle: Bundle, protocol: Protocol, most: int | None, labels: Iterable[str]
) -> dict[str, Any]:
    """Tokens that the model must read for each task, and in all: with the prefixes of an item shared, and without."""
    chosen, missing = bundle.chosen(labels)
    counts: dict[str, dict[str, int]] = {}
    before: list[int] = []
    for task in chosen:
        asked = unshared = shared = 0
        for item in items(task, bundle.rows(task), protocol, encoder, max_length, most):
            asked += 1
            for prompt in (p for p in item.prompts if p.start < len(p.ids)):
                read = prompt.ids[:-1]  # the last token is only predicted
                unshared += len(read)
                shared += len(read) - min(common_prefix(before, read), prompt.start - 1)
                before = read
        counts[task.label] = {"items": asked, "tokens": unshared, "tokens_shared": shared}
    sums = {name: sum(task[name] for task in counts.values()) for name in ("items", "tokens", "tokens_shared")}
    return {"protocol": protocol, "max_per_task": most, **sums, "tasks": counts, "missing": missing}


def show_plan(counts: dict[str, Any], tokens_per_s: float | None, console: Console) -> None:
    """Print the plan as a table."""
    table = Table(title=f"Tokens to read, protocol {counts['protocol']}, at most {counts['max_per_task']} items a task")
    for name in ("task", "items", "tokens", "with shared prefixes"):
        table.add_column(name, justify="left" if name == "task" else "right")
    for label, row in (*counts["tasks"].items(), ("all", counts)):
        table.add_row(label, *(f"{row[name]:,}" for name in ("items", "tokens", "tokens_shared")))
    for label in counts["missing"]:
        table.add_row(f"[red]{label}", "[red]missing", "", "")
    if tokens_per_s is not None:
        minutes = (f"{counts[name] / tokens_per_s / 60:.1f} min" for name in ("tokens", "tokens_shared"))
        table.add_row(f"at {tokens_per_s:,.0f} tokens/s", "", *minutes)
    console.print(table)
