"""What is recorded of an lm-eval result: scores, RULER's by length, and what the prompts were."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from evals.lm_eval.offline_tasks import RULER_TASKS


class Prompted(Protocol):
    """How a model cuts prompts; `max_length` holds a prompt and its answer, `scoring_room` all ids that are scored."""

    max_length: int

    @property
    def scoring_room(self) -> int: ...

    def tok_encode(self, string: str) -> list[int]: ...


def figures_of(result: dict[str, Any], model: Prompted, lengths: Sequence[int]) -> dict[str, Any]:
    """The scores of a result, RULER's by length, and what the prompts were: counts, lengths in tokens, cuts."""
    tasks = {name: numbers(values) for name, values in result["results"].items()}
    ruler = {
        str(length): {name: tasks[name][str(length)] for name in tasks if str(length) in tasks[name]}
        for length in lengths
        if set(tasks) & set(RULER_TASKS)
    }
    prompts = {name: prompt_figures(model, samples) for name, samples in result["samples"].items()}
    return {
        "tasks": tasks,
        "ruler": ruler,
        "prompts": prompts,
        "cut_prompts": sum(task["cut"] for task in prompts.values()),
        "max_length": model.max_length,
    }


def numbers(values: dict[str, Any]) -> dict[str, float]:
    """Metrics that are numbers, without lm-eval's name of the filter; -1 is RULER's word for "no document"."""
    kept = {key.removesuffix(",none"): value for key, value in values.items() if type(value) is float}
    return {key: value for key, value in kept.items() if math.isfinite(value) and value != -1}


def prompt_figures(model: Prompted, samples: list[dict[str, Any]]) -> dict[str, int]:
    """documents, longest_tokens (of a prompt with its continuation, or the most it may generate), cut (prompts)."""
    longest, cut = 0, 0
    for context, rest in (arguments for sample in samples for arguments in sample["arguments"]):
        if isinstance(rest, str):
            tokens, room = len(model.tok_encode(context + rest)), model.scoring_room
        else:
            tokens, room = len(model.tok_encode(context)) + rest.get("max_gen_toks", 0), model.max_length
        longest, cut = max(longest, tokens), cut + (tokens > room)
    return {"documents": len(samples), "longest_tokens": longest, "cut": cut}


def documents_sha256(samples: dict[str, list[dict[str, Any]]]) -> str:
    """Hash of the documents that were asked, in order."""
    digest = hashlib.sha256()
    for name, of_task in samples.items():
        digest.update(name.encode() + b"\0" + "".join(sample["doc_hash"] for sample in of_task).encode())
    return digest.hexdigest()


def show(figures: dict[str, Any]) -> None:
    """Print the scores as tables on stderr: RULER by length, the other tasks by metric."""
    console = Console(stderr=True)
    table = Table(title=figures["protocol"])
    for column in ("task", "metric", "score", "±", "documents"):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right")
    for name, metrics in figures["tasks"].items():
        for metric in [m for m in metrics if f"{m}_stderr" in metrics and name not in RULER_TASKS]:
            error = f"{metrics[f'{metric}_stderr']:.4f}"
            table.add_row(name, metric, f"{metrics[metric]:.4f}", error, f"{figures['prompts'][name]['documents']:,}")
    if table.row_count:
        console.print(table)
    if figures["ruler"]:
        ruler = Table("task", *figures["ruler"], title=f"RULER by length, {figures['haystack']} haystack")
        for name in [name for name in figures["tasks"] if name in RULER_TASKS]:
            scores = (of_length.get(name) for of_length in figures["ruler"].values())
            ruler.add_row(name, *("-" if score is None else f"{score:.3f}" for score in scores))
        console.print(ruler)
    if figures["cut_prompts"]:
        console.print(f"[bold red]{figures['cut_prompts']} prompts lost their head: give a longer --max-length")
