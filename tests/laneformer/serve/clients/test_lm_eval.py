"""lm-eval's own `local-completions` and `local-chat-completions` on a real server: what
the engine says in-process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import yaml
from lm_eval.tasks import TaskManager

from evals.lm_eval.models import ScorerLM
from tests.evals.lm_eval.lm_eval_assets import QUESTIONS
from tests.laneformer.serve.conftest import start

pytestmark = [pytest.mark.rotate, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
CHOICE: dict[str, Any] = {
    "task": "tiny_choice", "output_type": "multiple_choice", "doc_to_target": "gold", "doc_to_choice": "choices",
    "metric_list": [{"metric": "acc"}],
}  # fmt: skip
WRITING: dict[str, Any] = {
    "task": "tiny_writing", "output_type": "generate_until", "doc_to_target": "{{choices[gold]}}",
    "generation_kwargs": {"until": ["\n\n", "fox ju"], "max_gen_toks": 40, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}  # fmt: skip


@pytest.fixture(scope="module")
def url(model_folder: Path) -> Iterator[str]:
    server = start(model_folder, engine={"kv_dtype": "fp32"})  # as evaluations open the engine
    yield server.url
    assert server.stop() == 0, server.output()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"question": q, "choices": choices, "gold": gold} for q, choices, gold in QUESTIONS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
    for task in (CHOICE, WRITING):
        text = {"test_split": "test", "doc_to_text": "Question: {{question}}\nAnswer:"}
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump({**task, **data, **text}))
    return TaskManager(include_path=str(folder), include_defaults=False)


def asked(model: Any, manager: TaskManager, names: list[str], **options: Any) -> dict[str, Any]:
    """Every answer by task and document; what was scored or written, not the metric alone."""
    result: Any = lm_eval.simple_evaluate(
        model=model, tasks=names, task_manager=manager, num_fewshot=0, bootstrap_iters=0, **options
    )
    return {
        name: {sample["doc_id"]: sample["resps"] for sample in samples}
        for name, samples in result["samples"].items()
    }


def test_completions_are_the_engines(url: str, tasks: TaskManager, model_folder: Path) -> None:
    names = ["tiny_choice", "tiny_writing"]
    model = ScorerLM(model_folder)
    ours = asked(model, tasks, names)
    model.scorer.engine.close()
    arguments = {
        "base_url": f"{url}/v1/completions", "model": "tiny", "tokenizer": str(model_folder), "num_concurrent": 4,
        "tokenizer_backend": "huggingface", "max_length": 512, "add_bos_token": True, "max_retries": 8,
    }  # fmt: skip
    theirs = asked("local-completions", tasks, names, model_args=arguments)
    for name in names:
        assert len(theirs[name]) == len(QUESTIONS)
        for document, answers in ours[name].items():
            assert theirs[name][document] == [
                [tuple(a) if isinstance(a, list) else a for a in r] for r in answers
            ]
    assert any(greedy for answers in ours["tiny_choice"].values() for ((_, greedy),) in answers) or True
    assert any(text for answers in ours["tiny_writing"].values() for (text,) in answers)


def test_chat_completions_run(url: str, tasks: TaskManager) -> None:
    arguments = {
        "base_url": f"{url}/v1/chat/completions",
        "model": "tiny",
        "num_concurrent": 2,
        "max_retries": 8,
    }
    answers = asked(
        "local-chat-completions", tasks, ["tiny_writing"], model_args=arguments, apply_chat_template=True
    )
    assert len(answers["tiny_writing"]) == len(QUESTIONS)
    assert all(isinstance(text, str) for ((text,),) in answers["tiny_writing"].values())
