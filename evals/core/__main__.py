"""CORE, 22 tasks that separate models early in training, from a local bundle, on the engine or in Transformers.

    python -m evals.core runs/demo/hf --bundle eval_bundle --max-per-task 500 --out runs/demo/evals.jsonl --step 200
    python -m evals.core runs/demo/hf --bundle eval_bundle --max-per-task 500 --plan --tokens-per-s 50000

Finished tasks are kept next to --out until the record is written, so that an interrupted evaluation resumes.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Annotated, Any

import tyro

from evals.core.evaluate import Partial, Settings, evaluate, plan, show, show_plan
from evals.core.tasks import Bundle
from evals.scorer import Kind, open_encoder, open_scorer, read_config
from records.evals import NOWHERE, AboutFlags, EvalCommand
from records.files import code_version, file_sha256, model_sha256

ALL_ITEMS = Settings()


def main(
    model: Annotated[Path, tyro.conf.Positional],
    bundle: Path,
    settings: Annotated[Settings, tyro.conf.OmitArgPrefixes] = ALL_ITEMS,
    about: AboutFlags = NOWHERE,
    device: str = "auto",
    kind: Kind = "auto",
    plan_only: Annotated[bool, tyro.conf.arg(name="plan")] = False,
    tokens_per_s: float | None = None,
) -> dict[str, Any]:
    """CORE of a model. The last line on stdout is the record (or the plan), JSON.

    Args:
        model: Hugging Face model folder
        bundle: folder with the tasks: llm-foundry's scripts/eval/local_data, or nanochat's eval_bundle
        settings: what is asked
        about: options of the record
        device: device that runs the model: auto, cpu or cuda
        kind: backend, engine or transformers; auto selects the engine for a Laneformer on the CPU
        plan_only: only count the tokens that an evaluation would read
        tokens_per_s: measured prompt processing speed, to estimate the time of a --plan
    """
    started = time.perf_counter()
    tasks = Bundle(bundle)
    if plan_only:
        length = int(read_config(model).get("max_position_embeddings") or 1 << 30)
        counts = plan(open_encoder(model, kind), length, tasks, settings)
        show_plan(counts, tokens_per_s)
        return counts | {"tokens_per_s": tokens_per_s}
    chosen, _ = tasks.chosen(settings.tasks)
    data_sha256 = hashlib.sha256("".join(tasks.sha256(task) for task in chosen).encode()).hexdigest()
    scorer = open_scorer(model, device, kind)
    code = code_version(Path(__file__).parent)
    inputs = (model_sha256(model), data_sha256, settings.protocol, settings.max_per_task, scorer.name, code)
    partial = Partial(about.out, hashlib.sha256(repr(inputs).encode()).hexdigest())
    figures = evaluate(scorer, tasks, settings, partial)
    scorer.close()
    show(figures, tasks)
    tokenizer = model / "tokenizer.json"
    seconds, tokenizer_sha256 = time.perf_counter() - started, file_sha256(tokenizer) if tokenizer.is_file() else None
    record = about.append("core", figures, seconds=seconds, tokenizer_sha256=tokenizer_sha256, data_sha256=data_sha256)
    partial.remove()
    return record


COMMAND = EvalCommand("core", main, excludes=("--plan", "--tokens-per-s"))


if __name__ == "__main__":
    COMMAND.run()
