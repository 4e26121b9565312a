"""Tests of the 22 tasks and their bundle: layouts, core.yaml, baselines, bad rows."""

import json

import pytest

from evals.core.tasks import TASKS, Bundle
from tests.evals.core.core_assets import CHOICE_ROWS, eval_data, task, write_bundle

ROWS_OF_PUBLIC_FILES = {
    "hellaswag_zeroshot": 10042,
    "jeopardy": 2117,
    "bigbench_qa_wikidata": 20321,
    "arc_easy": 2376,
    "arc_challenge": 1172,
    "copa": 100,
    "commonsense_qa": 1221,
    "piqa": 1838,
    "openbook_qa": 500,
    "lambada_openai": 5153,
    "hellaswag": 10042,
    "winograd": 273,
    "winogrande": 1267,
    "bigbench_dyck_languages": 1000,
    "agi_eval_lsat_ar": 230,
    "bigbench_cs_algorithms": 1320,
    "bigbench_operators": 210,
    "bigbench_repeat_copy_logic": 32,
    "boolq": 3270,
    "bigbench_language_identification": 10000,
}


def test_public_files():
    bundle = Bundle(eval_data())
    counts = {t.label: len(bundle.rows(t)) for t in bundle.tasks if bundle.missing(t) is None}
    assert counts == ROWS_OF_PUBLIC_FILES
    chosen, missing = bundle.choose([t.label for t in TASKS])
    assert len(chosen) == 20
    assert list(missing) == ["squad", "coqa"]


def test_layouts(tmp_path):
    for root in ("eval_data", "local_data", "."):
        bundle = write_bundle(tmp_path / f"in {root}", ["copa"], root)
        assert bundle.rows(task("copa")) == CHOICE_ROWS
        assert bundle.missing(task("copa")) is None
        reason = str(bundle.missing(task("squad")))
        assert reason.startswith(str(bundle.root / "reading_comprehension/squad.jsonl"))
        assert "scripts/eval/local_data of mosaicml/llm-foundry" in reason


def test_core_yaml_holds_and_says_what_differs(tmp_path):
    write_bundle(tmp_path, ["copa", "jeopardy"])
    (tmp_path / "eval_data" / "moved.jsonl").write_text(json.dumps(CHOICE_ROWS[0]) + "\n")
    (tmp_path / "core.yaml").write_text("""
icl_tasks:
- {label: copa, dataset_uri: moved.jsonl, num_fewshot: [3], icl_task_type: multiple_choice}
- label: jeopardy
  dataset_uri: local_data/world_knowledge/jeopardy_all.jsonl
  num_fewshot: [10]
  icl_task_type: language_modeling
  continuation_delimiter: "\\nAnswer: "
  has_categories: true
- {label: mmlu_fewshot, dataset_uri: x, num_fewshot: [5], icl_task_type: multiple_choice}
""")
    bundle = Bundle(tmp_path)
    tasks = {t.label: t for t in bundle.tasks}
    assert bundle.differs == {"copa": {"shots": 3}}
    assert tasks["copa"].shots == 3
    assert bundle.rows(tasks["copa"]) == CHOICE_ROWS[:1]
    assert tasks["jeopardy"] == task("jeopardy")
    # the hash covers the shots, so answers to other prompts are not reused
    before = bundle.sha256(task("copa"))
    assert bundle.sha256(tasks["copa"]) != before
    (tmp_path / "core.yaml").write_text("tasks: []")
    with pytest.raises(ValueError, match="has no list icl_tasks"):
        Bundle(tmp_path)


BAD_ROWS = [
    ("copa", "{", r"copa\.jsonl:1: not JSON"),
    ("copa", '["a"]', "needs 'query' of type str"),
    ("copa", '{"query": "a", "choices": ["x", "y"]}', "needs 'gold' of type int"),
    (
        "copa",
        '{"query": "a", "choices": ["x", "y"], "gold": 2}',
        "gold = 2 is not the index of one of 2",
    ),
    ("copa", '{"query": "a", "choices": ["x"], "gold": 0}', "at least two options"),
    ("winograd", '{"context_options": ["x", 1], "continuation": "y", "gold": 0}', "each a text"),
    ("squad", '{"context": "a", "continuation": ""}', "continuation is empty"),
    ("squad", "", r"squad\.jsonl is empty"),
]


def test_bad_rows(tmp_path):
    bundle = write_bundle(tmp_path, ["copa", "winograd", "squad"])
    for label, line, reason in BAD_ROWS:
        bundle.file(task(label)).write_text(line + "\n")
        with pytest.raises(ValueError, match=reason):
            bundle.rows(task(label))
