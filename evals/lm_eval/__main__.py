"""lm-eval's stock tasks, or a task file of your own, on a model.

`ruler` stands for its eleven synthetic tasks, scored at each of `--lengths` tokens (the two that
download QA sets are chosen by name). `--limit N` takes the first N documents of a task, and of each
length of a RULER task.

    python -m evals.lm_eval runs/demo/hf --tasks arc_easy,arc_challenge --num-fewshot 0 --data eval_data --limit 100
    python -m evals.lm_eval HF_DIR --tasks ruler --lengths 2048,4096 --max-length 4224 --out runs/NAME/evals.jsonl
    python -m evals.lm_eval HF_DIR --tasks arc_easy,my_task.yaml --base-url http://127.0.0.1:8000/v1

An endpoint also needs the folder: its tokenizer encodes the prompts and determines the lengths of RULER's.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from evals.intervals import wilson
from evals.items import Partial
from evals.lm_eval.needles import counts, needles_of
from evals.lm_eval.tasks import (
    RULER_TASKS,
    SEEDS,
    check_packages,
    data_folder,
    expand_tasks,
    first_documents,
    load_tasks,
)
from evals.overlap import Overlap, OverlapFlag, clean_figures
from evals.scorer import LOCAL, SourceFlags, origin
from evals.tables import console, show_table
from records.evals import NOWHERE, AboutFlags, EvalCommand, Limit, ModelFolder, code_at_start, optional
from records.files import JsonObject
from records.items import write_items
from records.job import option_value

if TYPE_CHECKING:
    from lm_eval.api.model import TemplateLM

    from evals.lm_eval.models import ScorerLM

DEFAULT_LENGTHS = (2048, 4096)
RULER_CONTEXT = (
    "which documents are scored; RULER needs a --max-length up to 100 tokens above its longest length"
)
RIGHT = ("acc", "exact_match", "prompt_level_strict_acc")  # metrics of an item that are 0 or 1


@dataclass(frozen=True)
class Questions:
    """What is asked, and how."""

    tasks: str
    """comma-separated lm-eval task names or paths of task files (.yaml); `ruler` is
    RULER's eleven synthetic tasks
    """
    lengths: str = ",".join(map(str, DEFAULT_LENGTHS))
    """comma-separated lengths of a RULER prompt with its answer, in tokens"""
    limit: Limit = None
    """most documents to score per task, and per length of a RULER task"""
    num_fewshot: Annotated[int | None, optional("INT", "the task's own number")] = None
    """few-shot examples before each question"""
    data: Annotated[Path | None, optional("DIR", "the Hugging Face hub")] = None
    """folder of local data sets, with the layout that evals/lm_eval/tasks.py describes"""
    add_bos: bool = True
    """prepend BOS to every prompt, as in training"""
    chat_template: bool = False
    """ask through the model's chat template"""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"--limit {self.limit} must be at least 1; omit it to score all documents")


def lengths_of(text: str) -> list[int]:
    """The ascending token counts of a comma-separated list."""
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
    *,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    limit: int | None = None,
    **options: Any,
) -> JsonObject:
    """Run stock tasks; the result of `lm_eval.simple_evaluate` with samples. options: of that function."""
    import lm_eval

    manager, tasks = load_tasks(names, lengths, tokenizer)
    result: Any = lm_eval.simple_evaluate(
        model=model,
        tasks=tasks,
        task_manager=manager,
        # not lm-eval's `limit`, which takes the first documents of all lengths together, so only the shortest
        samples={task.task_name: first_documents(task, limit) for task in tasks},
        random_seed=SEEDS["random"],
        numpy_random_seed=SEEDS["numpy"],
        torch_random_seed=SEEDS["torch"],
        fewshot_random_seed=SEEDS["fewshot"],
        **options,
    )
    for name, samples in result[
        "samples"
    ].items():  # a task with several filters lists each document once a filter
        result["samples"][name] = [sample for sample in samples if sample["filter"] == samples[0]["filter"]]
    return result


def settings_figures(asked: Questions, names: Sequence[str], add_bos: bool) -> JsonObject:
    """The settings in a record. add_bos: whether prompts began with BOS, which not every model has."""
    shots = "the tasks' own shots" if asked.num_fewshot is None else f"{asked.num_fewshot}-shot"
    return {
        "protocol": f"lm-eval {version('lm-eval')}, {shots}, {'with' if add_bos else 'without'} BOS",
        "seed": SEEDS["random"],
        "seeds": SEEDS,
        "limit": asked.limit,
        "num_fewshot": asked.num_fewshot,
        "add_bos": add_bos,
        "chat_template": asked.chat_template,
        "haystack": ("upstream" if asked.data is None else "offline")
        if set(names) & set(RULER_TASKS)
        else None,
    }


def figures_of(result: JsonObject, model: ScorerLM, lengths: Sequence[int]) -> JsonObject:
    """The scores of a result, RULER's by length, and counts, lengths in tokens and
    truncations of the prompts.
    """
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


def numbers(values: JsonObject) -> dict[str, float]:
    """The numeric metrics: m or, of a filter, "m,filter", and its error with _stderr; -1:
    RULER has no documents.
    """
    found = {
        key.removesuffix(",none"): float(value) for key, value in values.items() if isinstance(value, float)
    }
    kept = {re.sub("(_stderr)(,.+)", r"\2\1", key): value for key, value in found.items()}
    return {key: value for key, value in kept.items() if math.isfinite(value) and value != -1}


def prompt_figures(model: ScorerLM, samples: list[JsonObject]) -> dict[str, int]:
    """documents, longest_tokens (a prompt and its continuation or generation limit), cut (truncated prompts)."""
    longest, cut = 0, 0
    for context, *more in (arguments for sample in samples for arguments in sample["arguments"]):
        rest = more[0] if more else None  # a rolling request is a text alone, read in windows
        if rest is None:
            tokens = len(model.tok_encode(context))
            room = tokens
        elif isinstance(rest, str):
            tokens, room = len(model.tok_encode(context + rest)), model.scoring_room
        else:
            tokens, room = len(model.tok_encode(context)) + rest.get("max_gen_toks", 0), model.max_length
        longest, cut = max(longest, tokens), cut + (tokens > room)
    return {"documents": len(samples), "longest_tokens": longest, "cut": cut}


def answers_of(samples: dict[str, list[JsonObject]]) -> Iterator[JsonObject]:
    """The lines of the file of items: right where the task scores it, losses in nats (not per
    token) of the choices; of RULER length and needles, see needles.py.
    """
    for name, of_task in samples.items():
        for sample in of_task:
            right = next((sample[metric] for metric in RIGHT if metric in sample), None)
            scored = [
                r[0]
                for r in sample["filtered_resps"]
                if isinstance(r, list | tuple) and isinstance(r[0], float)
            ]
            item = {"task": name, "item": sample["doc_id"], "right": None if right is None else bool(right)}
            if length := sample["doc"].get("max_length"):  # of RULER
                item |= {"length": length, "needles": needles_of(sample["doc"], sample["filtered_resps"][0])}
            yield item | {"losses": [-score for score in scored]}


def documents_sha256(samples: dict[str, list[JsonObject]]) -> str:
    """Hash of the documents, in order."""
    digest = hashlib.sha256()
    for name, of_task in samples.items():
        digest.update(name.encode() + b"\0" + "".join(sample["doc_hash"] for sample in of_task).encode())
    return digest.hexdigest()


def show(figures: JsonObject) -> None:
    """Print the scores as tables on stderr: RULER by length, the other tasks by metric."""
    rows = []
    for name, metrics in figures["tasks"].items():
        for metric in [m for m in metrics if not m.endswith("_stderr") and name not in RULER_TASKS]:
            error = f"{metrics[f'{metric}_stderr']:.4f}" if f"{metric}_stderr" in metrics else ""
            documents = f"{figures['prompts'][name]['documents']:,}"
            rows.append([name, metric, f"{metrics[metric]:.4f}", error, documents])
    if rows:
        show_table(figures["protocol"], ("task", "metric", "score", "±", "documents"), rows, texts=2)
    if figures["ruler"]:
        rows = []
        for name in [name for name in figures["tasks"] if name in RULER_TASKS]:
            rows.append([name, *(ruler_text(figures, length, name) for length in figures["ruler"])])
        show_table(f"RULER by length, {figures['haystack']} haystack", ("task", *figures["ruler"]), rows)
    if figures["cut_prompts"]:
        console.print(
            f"[bold red]{figures['cut_prompts']} prompts lost their head: give a longer --max-length"
        )


def ruler_text(figures: JsonObject, length: str, task: str) -> str:
    """A score, half of its Wilson interval of 95 %, and the documents."""
    if (score := figures["ruler"][length].get(task)) is None:
        return "-"
    asked = figures["ruler_counts"][length]["documents"][task]
    return f"{score:.3f} ± {wilson(score * asked, asked)[1]:.3f} of {asked}"


def main(
    hf_dir: ModelFolder,
    asked: Annotated[Questions, tyro.conf.arg(name="task", help=RULER_CONTEXT)],
    source: SourceFlags = LOCAL,
    about: AboutFlags = NOWHERE,
    overlap: OverlapFlag = None,
) -> JsonObject:
    """Score a model on lm-eval's tasks, or on task files of your own. The last line on stdout
    is the record, JSON.
    """
    search = Overlap(overlap) if overlap else None
    names, lengths, hf_dir = expand_tasks(asked.tasks), lengths_of(asked.lengths), hf_dir.resolve()
    about = replace(about, out=about.out and about.out.resolve())  # data_folder changes the working directory
    with data_folder(asked.data.resolve(), names) if asked.data else contextlib.nullcontext():
        from evals.lm_eval.models import ScorerLM

        model = ScorerLM(hf_dir, source, asked.add_bos)
        origin_of = origin(hf_dir, model.scorer)
        model.partial = Partial(about.out, "lm_eval", origin_of, model.max_length, code_at_start())
        result = evaluate(
            model, names, hf_dir, lengths=lengths, limit=asked.limit,
            num_fewshot=asked.num_fewshot, apply_chat_template=asked.chat_template,
        )  # fmt: skip
    settings = settings_figures(asked, names, model.add_bos)
    lines = list(answers_of(result["samples"]))
    figures = settings | figures_of(result, model, lengths)
    figures |= {"ruler_counts": counts(lines, lengths), "prompt_tokens": model.prompt_tokens}
    figures["reused_tokens"] = model.scorer.reused_tokens
    show(figures)
    model.scorer.close()
    who = origin_of | {"data_sha256": documents_sha256(result["samples"])}
    head = {"kind": "lm_eval", "step": about.step, **settings, **who}
    documents = {(task, each["doc_id"]): each["doc"] for task, of in result["samples"].items() for each in of}
    figures["clean"] = clean_figures(search, lines, documents)
    figures["items"] = write_items(about.out, head, lines)
    record = about.append("lm_eval", figures, **who)
    model.partial.remove()
    return record


def check_here(options: Sequence[str]) -> None:
    """Raise ValueError if a task needs packages that are not installed."""
    check_packages(expand_tasks(option_value("--tasks", options) or "arc_easy"))


COMMAND = EvalCommand("lm_eval", main, reads=("--data", "--overlap"), ready=check_here)


if __name__ == "__main__":
    COMMAND.run()
