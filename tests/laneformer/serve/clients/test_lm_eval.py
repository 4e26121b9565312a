"""Tests that lm-eval's `local-completions` on a server gives the engine's in-process results bit for bit."""

import json
from typing import Any

import pytest

from tests.laneformer.serve.conftest import start

# Rows of the data set are at ROWS
TASK = """
task: tiny
output_type: multiple_choice
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
doc_to_choice: choices
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: gold
metric_list: [{metric: acc}]
"""


def write_task(folder):
    from tests.evals.lm_eval.lm_eval_assets import QUESTIONS

    rows = [{"question": q, "choices": choices, "gold": gold} for q, choices, gold in QUESTIONS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tiny.yaml").write_text(TASK.replace("ROWS", str(folder / "rows.jsonl")))


def answers_of(model, manager, **options) -> dict[int, Any]:
    """Return every answer by document: what was scored, not only the metric."""
    import lm_eval

    result = lm_eval.simple_evaluate(
        model=model,
        tasks=["tiny"],
        task_manager=manager,
        num_fewshot=0,
        bootstrap_iters=0,
        **options,
    )
    return {sample["doc_id"]: sample["resps"] for sample in result["samples"]["tiny"]}


@pytest.mark.rotate
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scores_are_the_engines(model_folder, tmp_path):
    from lm_eval.tasks import TaskManager

    from evals.lm_eval.models import ScorerLM

    write_task(tmp_path)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    model = ScorerLM(model_folder)
    ours = answers_of(model, manager)
    model.scorer.engine.close()
    server = start(model_folder, engine={"kv_dtype": "fp32"})  # as evaluations open the engine
    arguments = {
        "base_url": f"{server.url}/v1/completions",
        "model": "tiny",
        "tokenizer": str(model_folder),
        "num_concurrent": 4,
        "tokenizer_backend": "huggingface",
        "max_length": 512,
        "add_bos_token": True,
        "max_retries": 8,
    }
    try:
        theirs = answers_of("local-completions", manager, model_args=arguments)
    finally:
        assert server.stop() == 0, server.output()
    assert len(theirs) == len(ours) > 0
    for document, answers in ours.items():
        assert theirs[document] == [[tuple(answer) for answer in choice] for choice in answers]
