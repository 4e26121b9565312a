"""Tests of CORE from rows to record by small real models, missing tasks, resuming."""

import dataclasses
import itertools
import re
import runpy
import shutil
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from evals import tables
from evals.core import evaluate as core
from evals.core.__main__ import main
from evals.core.evaluate import (
    ItemAnswer,
    Settings,
    judge_item,
    list_remarks,
    score_task,
    summarize_task,
)
from evals.core.prompts import Item, Protocol, items
from evals.core.tasks import TASKS, Bundle
from evals.items import Partial
from evals.scorer import Answerer, Prompt, Scorer, Scores, open_scorer
from records.evals import NOWHERE, About
from records.files import read_lines
from records.items import read_items
from tests.evals.core.core_assets import ROWS, task, write_bundle, write_laneformer, write_llama
from tests.evals.reference import scores_of

LABELS = ["copa", "winograd", "coqa"]


def check_answer(model: torch.nn.Module, scorer: Scorer, item: Item, answer: ItemAnswer) -> bool:
    """Compare an answer with a float64 pass over each whole prompt."""
    scores = [scores_of(model, *prompt) for prompt in item.prompts]
    right = answer["right"]
    losses = [-option.logprobs.mean() for option in scores]
    gold = answer["gold"]
    if len(scores) == 1:
        assert right == scores[0].greedy.all()
    else:
        first, second = sorted(losses)[:2]
        # float32 on this model is off by about 1e-5; the rows are no ties
        assert second - first > 1e-3
        assert (right, gold) == (losses[item.gold] == first, item.gold)
    ids, start = item.prompts[gold]
    assert answer["losses"] == pytest.approx(losses, abs=1e-4)
    assert answer["nats"] == pytest.approx(losses[gold] * (len(ids) - start), abs=1e-4 * len(ids))
    text = scorer._tokenizer.decode(ids[start:])
    # a space
    assert answer["bytes"] - len(text.encode()) in (0, 1)
    return right


@pytest.mark.parametrize("write", [write_laneformer, write_llama], ids=["engine", "transformers"])
def test_answers_of_each_type_against_plain_sums(tmp_path, write):
    model = write(tmp_path / "model")
    scorer = open_scorer(tmp_path / "model", Answerer(device="cpu"))
    bundle = write_bundle(tmp_path, LABELS)
    choices = []
    protocols: tuple[Protocol, ...] = ("nanochat", "dclm")
    for protocol, label, shots in itertools.product(protocols, LABELS, (None, 2)):
        chosen = task(label) if shots is None else dataclasses.replace(task(label), shots=shots)
        chosen_items = [*items(chosen, ROWS[chosen.type], protocol, scorer, scorer.max_length)]
        answers = score_task(chosen, bundle, Settings(protocol), scorer, Partial())
        right = [
            check_answer(model, scorer, *pair) for pair in zip(chosen_items, answers, strict=True)
        ]
        figures = summarize_task(chosen, answers, len(right))
        assert figures["accuracy"] == pytest.approx(sum(right) / len(right), rel=1e-15)
        choices += right if chosen.type != "language_modeling" else []
    # a random model is right by chance, not always or never
    assert 0.2 < sum(choices) / len(choices) < 0.8
    scorer.close()


def test_choices_have_the_lowest_mean_and_texts_every_token():
    # log-probability of each id; 5 is the greedy one
    logprobs = {5: -1.0, 6: -2.0, 7: -1.6}
    scorer = SimpleNamespace(text_after=lambda before, new: "ab" * len(new))
    for answers, gold, right, reason in (
        ([[5, 6], [7, 7]], 0, True, "means of -1.5 and -1.6"),
        ([[7], [5, 5, 6]], 1, True, "the mean decides: the first has the higher sum, -1.6"),
        ([[5], [5, 5]], 0, True, "the first of equals"),
        ([[5, 5]], 0, True, "every token is the best"),
        ([[5, 6]], 0, False, "one is not"),
        # an option without a token of its own is chosen only when it is the first, as a comparison
        # with nan has it
        ([[5], []], 1, False, "no token, second"),
        ([[], [5]], 0, True, "no token, first"),
    ):
        item = Item([Prompt([1, *answer], 1) for answer in answers], gold)
        values = [np.array([logprobs[i] for i in answer]) for answer in answers]
        scores = [Scores(nats, nats == logprobs[5]) for nats in values]
        assert judge_item(scorer, item, scores)["right"] == right, reason


def run(model: Path, bundle: Path, about: About = NOWHERE, **settings):
    return main(model, bundle, Settings(**settings), about=about)


def test_the_command(folder, tmp_path, capsys):
    write_bundle(tmp_path, LABELS)
    out = tmp_path / "run" / "evals.jsonl"
    record = run(folder, tmp_path, limit=3, about=About(out, 7, 70, "phase1"))
    assert read_lines(out) == [record]
    expected = {
        "kind": "core",
        "protocol": "nanochat",
        "seed": 1234,
        "limit": 3,
        "step": 7,
        "core_v2": None,
    }
    assert {name: record[name] for name in expected} == expected
    assert set(record["tasks"]) == set(LABELS)
    assert (record["tasks"]["copa"]["n"], record["tasks"]["copa"]["n_total"]) == (3, 5)
    assert len(record["missing"]) == 19
    assert "copy commonsense_reasoning/piqa.jsonl there" in record["missing"]["piqa"]
    assert "not_core" not in record
    log = capsys.readouterr().err
    assert "19 of 22 tasks are not in this bundle: CORE is not computed." in log
    assert "Missing: hellaswag_zeroshot" in log
    # a bundle with this file says in every record that it is not CORE
    shutil.copy(Path(core.__file__).with_name("demo_bundle") / "NOT_CORE", tmp_path)
    dclm = run(folder, tmp_path, protocol="dclm", tasks="copa")
    assert (dclm["protocol"], list(dclm["tasks"])) == ("dclm", ["copa"])
    assert dclm["missing"]["winograd"] == "not chosen by --tasks"
    assert dclm["not_core"].startswith("not CORE: a toy bundle")
    log = capsys.readouterr().err
    assert "not CORE: a toy bundle" in log
    assert "2 of 22 tasks were not chosen by --tasks" in log


def test_an_item_that_does_not_fit_makes_its_task_missing(tmp_path):
    write_laneformer(tmp_path / "model", context=6)
    write_bundle(tmp_path, LABELS)
    record = run(tmp_path / "model", tmp_path)
    assert "coqa" in record["tasks"]
    assert "does not fit into 6" in record["missing"]["copa"]
    lines = list_remarks(record, Bundle(tmp_path))
    assert any(line.startswith("copa could not be scored: an answer") for line in lines)
    assert record["core_v1"] is None


def test_all_tasks_give_core(folder, tmp_path, monkeypatch):
    bundle = write_bundle(tmp_path, [t.label for t in TASKS])
    text = StringIO()
    for module in ("evals.tables", "evals.core.evaluate"):
        monkeypatch.setattr(f"{module}.console", Console(file=text, width=80))
    record = run(folder, tmp_path, protocol="dclm")
    table = text.getvalue()
    assert f"CORE v2  {record['core_v2']:.4f} ± {record['core_v2_se']:.4f}" in table
    for label, figures in record["tasks"].items():
        numbers = (
            rf"{figures['n']} +{figures['accuracy']:.3f} .*{figures['gold_bits_per_byte']:.3f}"
        )
        # one line of 80 columns
        assert re.search(f"^ *{label} +{numbers} *$", table, re.MULTILINE)
    assert record["missing"] == {}
    assert len(record["tasks"]) == len(bundle.tasks) == 22
    centered = [figures["centered_v2"] for figures in record["tasks"].values()]
    assert record["core_v2"] == pytest.approx(sum(centered) / 22, abs=1e-12)


def test_a_narrow_terminal_loses_no_column(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert runpy.run_path(str(Path(tables.__file__)))["console"].width == 80


def test_answers_of_another_model_or_data_are_not_taken(tmp_path, monkeypatch):
    write_laneformer(tmp_path / "model")
    bundle = write_bundle(tmp_path / "data", ["copa"])
    monkeypatch.setattr(Partial, "remove", lambda self: None)
    changes = [tmp_path / "model/config.json", bundle.file(task("copa"))]
    for count, changed in enumerate((*changes, None), 1):
        run(tmp_path / "model", tmp_path / "data", about=About(tmp_path / "evals.jsonl"))
        assert len(list(tmp_path.glob(".evals.jsonl.core-*.jsonl"))) == count
        if changed:
            changed.write_text(changed.read_text() + "\n")


def test_the_answer_to_every_item_is_kept(folder, tmp_path):
    # the answers give the record's figures again
    write_bundle(tmp_path, LABELS)
    about = About(tmp_path / "run/evals.jsonl", 7)
    record = run(folder, tmp_path, about=about)
    head, lines = read_items(tmp_path / "run" / record["items"])
    assert record["items"].startswith("items/core-7-")
    assert (head["model_sha256"], head["data_sha256"]) == (
        record["model_sha256"],
        record["data_sha256"],
    )
    for label, figures in record["tasks"].items():
        of_task = [line for (name, _), line in lines.items() if name == label]
        assert summarize_task(task(label), of_task, figures["n_total"]) == figures
        bits = (
            sum(line["nats"] for line in of_task)
            / np.log(2)
            / sum(line["bytes"] for line in of_task)
        )
        assert figures["gold_bits_per_byte"] == pytest.approx(bits, rel=1e-12)
    # named by its content
    assert run(folder, tmp_path, about=about)["items"] == record["items"]


def test_bad_input(folder, tmp_path):
    write_bundle(tmp_path, ["copa"])
    with pytest.raises(ValueError, match="are not in CORE"):
        run(folder, tmp_path, tasks="mmlu")
    with pytest.raises(ValueError, match="holds none of CORE's tasks"):
        main(folder, tmp_path / "nothing")
