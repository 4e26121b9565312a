"""CORE, 22 tasks that separate models early in training, from a local bundle, on the
engine or in Transformers.

    python -m evals.core runs/demo/hf --bundle eval_bundle --limit 500 --out runs/demo/evals.jsonl --step 200
    python -m evals.core runs/demo/hf --bundle eval_bundle --limit 500 --plan --tokens-per-s 50000

Answers are kept next to --out until the record is written, so that an interrupted evaluation resumes.
The answer to every item stays in items/ there; `python -m evals.compare` compares two such files.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any

import tyro

from evals.core.evaluate import VERSIONS, Settings, core_differences, evaluate, plan, show, show_plan
from evals.core.prompts import asked_rows
from evals.core.tasks import Bundle
from evals.items import Partial
from evals.overlap import Overlap, OverlapFlag, clean_figures
from evals.scorer import LOCAL, Encoder, SourceFlags, open_scorer, origin, read_config
from records.evals import NOWHERE, AboutFlags, EvalCommand, ModelFolder, code_at_start, optional
from records.files import JsonObject
from records.items import write_items

ALL_ITEMS = Settings()
SettingsFlags = Annotated[
    Settings,
    tyro.conf.arg(name="task", help="which items are scored, and their prompts"),
]


def main(
    hf_dir: ModelFolder,
    bundle: Path,
    settings: SettingsFlags = ALL_ITEMS,
    source: SourceFlags = LOCAL,
    about: AboutFlags = NOWHERE,
    overlap: OverlapFlag = None,
    plan_only: Annotated[bool, tyro.conf.arg(name="plan")] = False,
    tokens_per_s: Annotated[float | None, optional("FLOAT", "no estimate")] = None,
) -> dict[str, Any]:
    """CORE of a model. The last line on stdout is the record (or the plan), JSON.

    Args:
        bundle: folder with the tasks: llm-foundry's scripts/eval/local_data, or nanochat's eval_bundle
        plan_only: only count the tokens and forward passes of the evaluation, without running it
        tokens_per_s: measured prompt processing speed, from which --plan estimates the time
    """
    tasks = Bundle(bundle)
    if plan_only:
        length = source.max_length or int(read_config(hf_dir).get("max_position_embeddings") or 1 << 30)
        counts = plan(Encoder(hf_dir), length, tasks, settings)
        show_plan(counts, tokens_per_s)
        return counts | {"tokens_per_s": tokens_per_s}
    search = Overlap(overlap) if overlap else None
    chosen, _ = tasks.chosen(settings.labels())
    data_sha256 = hashlib.sha256("".join(tasks.sha256(task) for task in chosen).encode()).hexdigest()
    scorer = open_scorer(hf_dir, source)
    who = origin(hf_dir, scorer) | {"data_sha256": data_sha256}
    inputs = (who, settings.protocol, settings.limit, scorer.max_length, code_at_start())
    partial = Partial(about.out, "core", *inputs)
    figures = evaluate(scorer, tasks, settings, partial)
    scorer.close()
    show(figures, tasks)
    lines = [
        {"task": label, "item": i, **each}
        for label in figures["tasks"]
        for i, each in enumerate(partial.answers[label])
    ]
    figures["clean"] = clean(search, figures, lines, tasks, settings)
    head = {"kind": "core", "step": about.step, "protocol": settings.protocol, "limit": settings.limit, **who}
    figures["items"] = write_items(about.out, head, lines)
    record = about.append("core", figures, **who)
    partial.remove()
    return record


def clean(
    search: Overlap | None, figures: JsonObject, lines: list[JsonObject], tasks: Bundle, settings: Settings
) -> JsonObject | None:
    """The scores of the items that the training text did not hold, of CORE as well."""
    asked = {
        (task.label, i): row
        for task in tasks.chosen(list(figures["tasks"]))[0]
        for i, row in enumerate(asked_rows(task, tasks.rows(task), settings.protocol, settings.limit))
    }
    if (found := clean_figures(search, lines, asked)) is None:
        return None
    known = {task: row for task, row in found["tasks"].items() if row["score"] is not None}
    changes = core_differences(known)
    for name in (f"core_{version}" for version in VERSIONS):
        change = changes[name]
        found[name] = None if change is None else figures[name] + change
        found |= {f"{name}_difference": change, f"{name}_difference_se": changes[f"{name}_se"]}
    return found


COMMAND = EvalCommand("core", main, excludes=("--plan", "--tokens-per-s"), reads=("--bundle", "--overlap"))


if __name__ == "__main__":
    COMMAND.run()
