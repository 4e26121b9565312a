"""lm-eval's own `local-completions` on a real server: to the bit what the engine says in-process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.laneformer.serve.conftest import start

TASK: dict[str, Any] = {"test_split": "test", "doc_to_text": "Question: {{question}}\nAnswer:"}
CHOICE: dict[str, Any] = {
    "task": "tiny_choice", "output_type": "multiple_choice", "doc_to_target": "gold", "doc_to_choice": "choices",
    "metric_list": [{"metric": "acc"}],
}  # fmt: skip
WRITING: dict[str, Any] = {
    "task": "tiny_writing", "output_type": "generate_until", "doc_to_target": "{{choices[gold]}}",
    "generation_kwargs": {"until": ["\n\n", "fox ju"], "max_gen_toks": 40, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}  # fmt: skip


def write_tasks(folder: Path) -> None:
    import yaml

    from tests.evals.lm_eval.lm_eval_assets import QUESTIONS

    rows = [{"question": q, "choices": choices, "gold": gold} for q, choices, gold in QUESTIONS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"data_files": {"test": str(folder / "rows.jsonl")}}
    for task in (CHOICE, WRITING):
        described = {**TASK, **task, "dataset_path": "json", "dataset_kwargs": files}
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(described))


def answers_of(model: Any, manager: Any, **options: Any) -> dict[str, Any]:
    """Every answer by task and document; what was scored or written, not the metric alone."""
    import lm_eval

    result: Any = lm_eval.simple_evaluate(
        model=model, tasks=["tiny_choice", "tiny_writing"], task_manager=manager, num_fewshot=0,
        bootstrap_iters=0, **options,
    )  # fmt: skip
    return {
        name: {sample["doc_id"]: sample["resps"] for sample in samples}
        for name, samples in result["samples"].items()
    }


@pytest.mark.rotate
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_completions_are_the_engines(model_folder: Path, tmp_path: Path) -> None:
    from lm_eval.tasks import TaskManager

    from evals.lm_eval.models import ScorerLM

    write_tasks(tmp_path)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    model = ScorerLM(model_folder)
    ours = answers_of(model, manager)
    model.scorer.engine.close()
    server = start(model_folder, engine={"kv_dtype": "fp32"})  # as evaluations open the engine
    arguments = {
        "base_url": f"{server.url}/v1/completions", "model": "tiny", "tokenizer": str(model_folder),
        "num_concurrent": 4, "tokenizer_backend": "huggingface", "max_length": 512, "add_bos_token": True,
        "max_retries": 8,
    }  # fmt: skip
    try:
        theirs = answers_of("local-completions", manager, model_args=arguments)
    finally:
        assert server.stop() == 0, server.output()
    for name, documents in ours.items():
        assert len(theirs[name]) == len(documents) > 0
        for document, answers in documents.items():
            expected = [[tuple(a) if isinstance(a, list) else a for a in answer] for answer in answers]
            assert theirs[name][document] == expected
    assert any(text for answers in ours["tiny_writing"].values() for (text,) in answers)
