"""CORE, 22 tasks that separate models early in training, from a local bundle, on the engine or in Transformers.

    python -m evals.core runs/demo/hf --bundle eval_bundle --limit 500 --out runs/demo/evals.jsonl --step 200

An interrupted evaluation resumes. `python -m evals.compare` compares the files of items of two.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any

import tyro

from evals.core.evaluate import Settings, evaluate, show
from evals.core.tasks import Bundle
from evals.items import open_partial
from evals.scorer import LOCAL, AnswererFlags, identify_model, open_scorer
from records.evals import NOWHERE, AboutFlags, EvalCommand, ModelFolder, code_at_start

ALL_ITEMS = Settings()


def main(
    hf_dir: ModelFolder,
    bundle: Path,
    settings: Annotated[
        Settings, tyro.conf.arg(name="task", help="which items are scored, and their prompts")
    ] = ALL_ITEMS,
    answerer: AnswererFlags = LOCAL,
    about: AboutFlags = NOWHERE,
) -> dict[str, Any]:
    """CORE of a model. The last line on stdout is the record, JSON.

    Args:
        bundle: folder with the tasks: llm-foundry's scripts/eval/local_data, or nanochat's eval_bundle
    """
    opened = Bundle(bundle)
    chosen, _ = opened.choose(settings.labels())
    data_sha256 = hashlib.sha256("".join(map(opened.sha256, chosen)).encode()).hexdigest()
    scorer = open_scorer(hf_dir, answerer)
    who = identify_model(hf_dir, scorer) | {"data_sha256": data_sha256}
    conditions = {"protocol": settings.protocol, "limit": settings.limit}
    partial = open_partial(about.out, "core", who, conditions, scorer.max_length, code_at_start())
    figures = evaluate(scorer, opened, settings, partial)
    scorer.close()
    show(figures, opened)
    lines = [
        {"task": label, "item": number, **answer}
        for label in figures["tasks"]
        for number, answer in enumerate(partial.answers[label])
    ]
    record = about.append_with_items("core", figures, conditions, lines, **who)
    partial.remove()
    return record


COMMAND = EvalCommand("core", main, reads=("--bundle",))


if __name__ == "__main__":
    COMMAND.run()
