"""lm-eval's stock tasks, or a task file of your own, on a model.

    python -m evals.lm_eval runs/demo/hf --tasks arc_easy,arc_challenge --num-fewshot 0 --data eval_data --limit 100
    python -m evals.lm_eval HF_DIR --tasks ruler --lengths 2048,4096 --max-length 4224 --out runs/NAME/evals.jsonl
    python -m evals.lm_eval HF_DIR --tasks arc_easy,my_task.yaml --base-url http://127.0.0.1:8000/v1

An endpoint also needs the folder: its tokenizer encodes the prompts.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from evals.intervals import wilson
from evals.items import open_partial
from evals.lm_eval.needles import counts
from evals.lm_eval.tasks import (
    RULER_TASKS,
    SEEDS,
    expand_tasks,
    hash_documents,
    load_tasks,
    make_item_lines,
    select_documents,
    use_data_folder,
)
from evals.scorer import LOCAL, AnswererFlags, identify_model
from evals.tables import console, show_table
from records.command import Natural, check_ranges
from records.evals import (
    NOWHERE,
    AboutFlags,
    EvalCommand,
    Limit,
    ModelFolder,
    code_at_start,
    optional,
)
from records.files import JsonObject
from records.job import option_value

if TYPE_CHECKING:
    from lm_eval.api.model import TemplateLM

    from evals.lm_eval.models import ScorerLM

RULER_CONTEXT = "which documents are scored; RULER needs a --max-length up to 100 tokens above its longest length"


@dataclass(frozen=True)
class Questions:
    """Which documents are scored, and how."""

    tasks: str
    """comma-separated lm-eval task names or task files (.yaml); `ruler`: RULER's eleven synthetic tasks"""
    lengths: str = "2048,4096"
    """comma-separated lengths of a RULER prompt with its answer, in tokens"""
    limit: Limit = None
    """maximum number of documents to score per task, and per length of a RULER task"""
    num_fewshot: Annotated[Natural | None, optional("INT", "the task's own number")] = None
    """few-shot examples before each question"""
    data: Annotated[Path | None, optional("DIR", "the Hugging Face hub")] = None
    """folder of local data sets, with the layout that evals/lm_eval/tasks.py describes"""
    add_bos: bool = True
    """prepend BOS to every prompt, as in training"""
    chat_template: bool = False
    """ask through the model's chat template"""

    def __post_init__(self) -> None:
        check_ranges(Questions, vars(self))
        parse_lengths(self.lengths)


def parse_lengths(text: str) -> list[int]:
    lengths = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(lengths) < 512 or lengths != sorted(set(lengths)):
        raise ValueError(
            f"--lengths {text} must be ascending token counts of at least 512, such as 2048,4096"
        )
    return lengths


def evaluate(
    model: TemplateLM,
    names: Sequence[str],
    tokenizer: Path,
    lengths: Sequence[int],
    limit: int | None,
    **options: Any,
) -> JsonObject:
    """Run stock tasks; return the result of `lm_eval.simple_evaluate` (which takes `options`) with samples."""
    import lm_eval

    manager, tasks = load_tasks(names, lengths, tokenizer)
    result: Any = lm_eval.simple_evaluate(
        model=model,
        tasks=tasks,
        task_manager=manager,
        # not lm-eval's `limit`, which takes the first documents of all lengths together, so only the shortest
        samples={task.task_name: select_documents(task, limit) for task in tasks},
        random_seed=SEEDS["random"],
        numpy_random_seed=SEEDS["numpy"],
        torch_random_seed=SEEDS["torch"],
        fewshot_random_seed=SEEDS["fewshot"],
        **options,
    )
    # a task with several filters lists each document once a filter
    for name, samples in result["samples"].items():
        result["samples"][name] = [
            sample for sample in samples if sample["filter"] == samples[0]["filter"]
        ]
    return result


def describe_settings(questions: Questions, names: Sequence[str], add_bos: bool) -> JsonObject:
    """Return the settings of a record. add_bos: whether prompts began with BOS."""
    shots = (
        "the tasks' own shots" if questions.num_fewshot is None else f"{questions.num_fewshot}-shot"
    )
    haystack = "upstream" if questions.data is None else "offline"
    return {
        "protocol": f"lm-eval {version('lm-eval')}, {shots}, {'with' if add_bos else 'without'} BOS",
        "seed": SEEDS["random"],
        "seeds": SEEDS,
        "limit": questions.limit,
        "num_fewshot": questions.num_fewshot,
        "add_bos": add_bos,
        "chat_template": questions.chat_template,
        "haystack": haystack if set(names) & set(RULER_TASKS) else None,
    }


def figures_of(result: JsonObject, model: ScorerLM, lengths: Sequence[int]) -> JsonObject:
    tasks = {name: numbers(values) for name, values in result["results"].items()}
    ruler: dict[str, dict[str, float]] = {}
    if set(tasks) & set(RULER_TASKS):
        for length in map(str, lengths):
            ruler[length] = {
                name: scores[length] for name, scores in tasks.items() if length in scores
            }
    prompts = {
        name: summarize_prompts(model, samples) for name, samples in result["samples"].items()
    }
    return {
        "tasks": tasks,
        "ruler": ruler,
        "prompts": prompts,
        "cut_prompts": sum(task["cut"] for task in prompts.values()),
        "max_length": model.max_length,
    }


def numbers(values: JsonObject) -> dict[str, float]:
    metrics = {}
    for key, value in values.items():
        # -1: RULER has no documents
        if isinstance(value, float) and math.isfinite(value) and value != -1:
            name = re.sub("(_stderr)(,.+)", r"\2\1", key.removesuffix(",none"))
            metrics[name] = float(value)
    return metrics


def summarize_prompts(model: ScorerLM, samples: list[JsonObject]) -> dict[str, int]:
    """Count documents, longest_tokens (a prompt with its continuation or generation limit), cut (truncated prompts)."""
    longest = cut = 0
    for context, *more in (arguments for sample in samples for arguments in sample["arguments"]):
        # a rolling request has no continuation; its text is read in windows
        if not more:
            tokens = room = len(model.tok_encode(context))
        elif isinstance(more[0], str):
            tokens = len(model.tok_encode(context + more[0]))
            room = model.max_scored_ids
        else:
            tokens = len(model.tok_encode(context)) + more[0].get("max_gen_toks", 0)
            room = model.max_length
        longest = max(longest, tokens)
        cut = cut + (tokens > room)
    return {"documents": len(samples), "longest_tokens": longest, "cut": cut}


def show(figures: JsonObject) -> None:
    rows = []
    for name, metrics in figures["tasks"].items():
        for metric in [metric for metric in metrics if not metric.endswith("_stderr")]:
            score = metrics[metric]
            error = metrics.get(f"{metric}_stderr")
            documents = figures["prompts"][name]["documents"]
            # its metrics are lengths
            if name in RULER_TASKS:
                documents = figures["ruler_counts"][metric]["documents"][name]
                error = wilson(score * documents, documents)[1]
            half_width = "" if error is None else f"{error:.4f}"
            rows.append([name, metric, f"{score:.4f}", half_width, f"{documents:,}"])
    show_table(figures["protocol"], ("task", "metric", "score", "±", "documents"), rows, texts=2)
    if figures["cut_prompts"]:
        console.print(
            f"[bold red]{figures['cut_prompts']} prompts lost their head: give a longer --max-length"
        )


def main(
    hf_dir: ModelFolder,
    questions: Annotated[Questions, tyro.conf.arg(name="task", help=RULER_CONTEXT)],
    answerer: AnswererFlags = LOCAL,
    about: AboutFlags = NOWHERE,
) -> JsonObject:
    """Score a model on lm-eval's tasks, or on task files of your own. The last line on stdout
    is the record, JSON.
    """
    names = expand_tasks(questions.tasks)
    lengths = parse_lengths(questions.lengths)
    hf_dir = hf_dir.resolve()
    # use_data_folder changes the working directory
    about = replace(about, out=about.out and about.out.resolve())
    with (
        use_data_folder(questions.data.resolve(), names)
        if questions.data
        else contextlib.nullcontext()
    ):
        from evals.lm_eval.models import ScorerLM

        model = ScorerLM(hf_dir, answerer, questions.add_bos)
        who = identify_model(hf_dir, model.scorer)
        model.partial = open_partial(about.out, "lm_eval", who, model.max_length, code_at_start())
        result = evaluate(
            model,
            names,
            hf_dir,
            lengths,
            questions.limit,
            num_fewshot=questions.num_fewshot,
            apply_chat_template=questions.chat_template,
        )
    settings = describe_settings(questions, names, model.add_bos)
    lines = make_item_lines(result["samples"])
    figures = {
        **settings,
        **figures_of(result, model, lengths),
        "ruler_counts": counts(lines, lengths),
        "prompt_tokens": model.prompt_tokens,
        "reused_tokens": model.scorer.reused_tokens,
    }
    show(figures)
    model.scorer.close()
    who |= {"data_sha256": hash_documents(result["samples"])}
    record = about.append_with_items("lm_eval", figures, settings, lines, **who)
    model.partial.remove()
    return record


def check_here(options: Sequence[str]) -> None:
    """Raise ValueError if a task file is missing."""
    expand_tasks(option_value("--tasks", options) or "arc_easy")


COMMAND = EvalCommand("lm_eval", main, reads=("--data",), ready=check_here)


if __name__ == "__main__":
    COMMAND.run()
