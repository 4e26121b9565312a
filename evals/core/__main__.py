"""CORE: 22 tasks that tell models apart early in training, from a local bundle, by the engine or by Transformers.

    python -m evals.core runs/demo/hf --bundle eval_bundle --max-per-task 500 --out runs/demo/evals.jsonl --step 200
    python -m evals.core runs/demo/hf --bundle eval_bundle --max-per-task 500 --plan --tokens-per-s 50000

A choice is the option whose tokens have the lowest mean loss; a text is right if each of its tokens is the likeliest.
Finished tasks are kept beside --out until the record is written, so that an interrupted one goes on where it was.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from evals.core.metric import aggregate, task_figures
from evals.core.plan import plan, show_plan
from evals.core.prompts import FEWSHOT_SEED, Item, Prompt, Protocol, Unscorable, items
from evals.core.tasks import Bundle, Task
from evals.scorer import Kind, Scorer, open_encoder, open_scorer, read_config
from records.evals import NOWHERE, About, AboutFlags, EvalCommand
from records.files import code_version, file_sha256, model_sha256, write_atomically

console = Console(stderr=True)
Tasks = dict[str, dict[str, Any]]


def is_right(scorer: Scorer, item: Item) -> bool:
    """Whether the model answers an item right."""
    if len(item.prompts) == 1:
        return bool(scorer.score(item.prompts[0].ids, item.prompts[0].start).greedy.all())
    losses = [mean_loss(scorer, prompt) for prompt in item.prompts]
    return min(range(len(losses)), key=losses.__getitem__) == item.gold


def mean_loss(scorer: Scorer, prompt: Prompt) -> float:
    """Nats per token of an option; nan, as in nanochat, for one that has no token of its own ("hot" before "hot air").

    As no comparison with nan is true, such an option is chosen if it is the first, and never otherwise.
    """
    if prompt.start == len(prompt.ids):
        return float("nan")
    return -float(scorer.score(prompt.ids, prompt.start).logprobs.mean())


def score_task(
    task: Task,
    bundle: Bundle,
    protocol: Protocol,
    scorer: Scorer,
    most: int | None,
    advance: Callable[..., None] = lambda *, completed, total: None,
) -> dict[str, Any]:
    """The figures of one task. Unscorable when an item does not fit into the model's context."""
    rows = bundle.rows(task)
    total = len(rows) if most is None else min(most, len(rows))
    right: dict[str, list[bool]] = {}
    for done, item in enumerate(items(task, rows, protocol, scorer, scorer.max_length, most)):
        advance(completed=done, total=total)
        right.setdefault(item.group, []).append(is_right(scorer, item))
    return task_figures(task, right, len(rows))


class Partial:
    """Finished tasks of an evaluation that is not finished: a JSON file beside `out`, None for no file.

    `key` stands for everything that decides the figures; a file of another key is not looked at.
    """

    def __init__(self, out: Path | None, key: str):
        self.path = out.with_name(f".{out.name}.core-{key[:16]}.json") if out is not None else None
        self.tasks: Tasks = {}
        if self.path is not None and self.path.is_file():
            self.tasks = json.loads(self.path.read_text(encoding="utf-8"))

    def add(self, label: str, figures: dict[str, Any]) -> None:
        self.tasks[label] = figures
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(self.tasks))

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def evaluate(
    scorer: Scorer, bundle: Bundle, protocol: Protocol, most: int | None, labels: Iterable[str], partial: Partial
) -> dict[str, Any]:
    """Score the tasks; the figures of a `core` record."""
    chosen, missing = bundle.chosen(labels)
    tasks: Tasks = {}
    columns = (TextColumn("{task.description:>32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        for task in chosen:
            bar = progress.add_task(task.label, total=None)
            try:
                if task.label not in partial.tasks:
                    advance = functools.partial(progress.update, bar)
                    partial.add(task.label, score_task(task, bundle, protocol, scorer, most, advance))
                tasks[task.label] = partial.tasks[task.label]
            except Unscorable as error:
                missing[task.label] = str(error)
            progress.remove_task(bar)
    settings = {"protocol": protocol, "seed": FEWSHOT_SEED, "max_per_task": most, "scorer": scorer.name}
    marks = {} if bundle.not_core is None else {"not_core": bundle.not_core}
    return settings | aggregate(tasks) | {"tasks": tasks, "missing": missing, "differs": bundle.differs} | marks


def show(figures: dict[str, Any]) -> None:
    """Print the figures as a table on stderr."""
    table = Table(title=f"{figures.get('not_core', 'CORE')}, protocol {figures['protocol']}")
    for name in ("task", "type", "shots", "n", "accuracy", "± SE", "centered v1", "centered v2"):
        table.add_column(name, justify="left" if name in ("task", "type") else "right", overflow="fold")
    for label, task in figures["tasks"].items():
        values = (f"{task[name]:.4f}" for name in ("accuracy", "standard_error", "centered_v1", "centered_v2"))
        table.add_row(label, task["type"], str(task["shots"]), str(task["n"]), *values)
    for label, reason in figures["missing"].items():
        table.add_row(f"[red]{label}", "[red]missing", *[""] * 6)
        console.print(f"[red]{label}: {reason}", highlight=False)
    for label, values in figures["differs"].items():
        console.print(f"[yellow]{label}: core.yaml has {values}, which is not CORE's own", highlight=False)
    table.add_section()
    for version in ("v1", "v2"):
        value, error = figures[f"core_{version}"], figures[f"core_{version}_se"]
        text = "N/A" if value is None else f"{value:.4f} ± {error:.4f}"
        table.add_row(f"CORE {version}", "", "", "", "", "", *((text, "") if version == "v1" else ("", text)))
    console.print(table)


def measure(
    model: Path,
    bundle: Bundle,
    protocol: Protocol,
    most: int | None,
    labels: tuple[str, ...],
    about: About,
    device: str,
    kind: Kind,
) -> dict[str, Any]:
    """Score a model folder, print the table and append the record, which is returned."""
    started = time.perf_counter()
    chosen, _ = bundle.chosen(labels)
    data_sha256 = hashlib.sha256("".join(bundle.sha256(task) for task in chosen).encode()).hexdigest()
    scorer = open_scorer(model, device, kind)
    code = code_version(Path(__file__).parent)
    decides = (model_sha256(model), data_sha256, protocol, most, scorer.name, code)
    partial = Partial(about.out, hashlib.sha256(repr(decides).encode()).hexdigest())
    figures = evaluate(scorer, bundle, protocol, most, labels, partial)
    scorer.close()
    show(figures)
    tokenizer = model / "tokenizer.json"
    record = about.append(
        "core",
        figures,
        seconds=time.perf_counter() - started,
        tokenizer_sha256=file_sha256(tokenizer) if tokenizer.is_file() else None,
        data_sha256=data_sha256,
    )
    partial.remove()
    return record


def main(
    model: Annotated[Path, tyro.conf.Positional],
    bundle: Path,
    protocol: Protocol = "nanochat",
    max_per_task: int | None = None,
    tasks: tuple[str, ...] = (),
    about: AboutFlags = NOWHERE,
    device: str = "auto",
    kind: Kind = "auto",
    plan_only: Annotated[bool, tyro.conf.arg(name="plan")] = False,
    tokens_per_s: float | None = None,
) -> None:
    """CORE of a model. The last line on stdout is the record (or the plan), JSON.

    Args:
        model: Hugging Face folder
        bundle: folder of the tasks: llm-foundry's scripts/eval/local_data, or nanochat's eval_bundle
        protocol: nanochat or dclm; their scores cannot be compared
        max_per_task: items of each task; all by default
        tasks: labels of the tasks to score; all by default. CORE itself needs all
        about: where the record goes, and what it is about
        device: where the model runs: auto, cpu or cuda
        kind: what runs it: the engine or transformers; auto takes the engine for a Laneformer
        plan_only: score nothing, only count the tokens that would be read
        tokens_per_s: measured speed of reading prompts, for the plan's minutes
    """
    if max_per_task is not None and max_per_task < 1:
        raise ValueError(f"--max-per-task {max_per_task}: at least 1 item is needed")
    rows = Bundle(bundle)
    if plan_only:
        length = int(read_config(model).get("max_position_embeddings") or 1 << 30)
        counts = plan(open_encoder(model, kind), length, rows, protocol, max_per_task, tasks)
        show_plan(counts, tokens_per_s, console)
        print(json.dumps(counts | {"tokens_per_s": tokens_per_s}))
    else:
        print(json.dumps(measure(model, rows, protocol, max_per_task, tasks, about, device, kind)))


COMMAND = EvalCommand("core", main, excludes=("--plan", "--tokens-per-s"))


if __name__ == "__main__":
    COMMAND.run()
