"""CORE, 22 tasks that separate models early in training, from a local bundle, on the engine or in Transformers.

    python -m evals.core runs/demo/hf --bundle eval_bundle --max-per-task 500 --out runs/demo/evals.jsonl --step 200
    python -m evals.core runs/demo/hf --bundle eval_bundle --max-per-task 500 --plan --tokens-per-s 50000

Finished tasks are kept next to --out until the record is written, so that an interrupted evaluation resumes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import tyro

from evals.core.evaluate import Settings, measure, plan, show_plan
from evals.core.tasks import Bundle
from evals.scorer import Kind, open_encoder, read_config
from records.evals import NOWHERE, AboutFlags, EvalCommand

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
    tasks = Bundle(bundle)
    if not plan_only:
        return measure(model, tasks, settings, about, device, kind)
    length = int(read_config(model).get("max_position_embeddings") or 1 << 30)
    counts = plan(open_encoder(model, kind), length, tasks, settings)
    show_plan(counts, tokens_per_s)
    return counts | {"tokens_per_s": tokens_per_s}


COMMAND = EvalCommand("core", main, excludes=("--plan", "--tokens-per-s"))


if __name__ == "__main__":
    COMMAND.run()
