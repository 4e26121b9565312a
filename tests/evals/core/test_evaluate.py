"""CORE from rows to record, by real small models: answers against plain log-softmax sums, missing tasks, resuming."""

import dataclasses
import re
import shutil
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from evals.core import evaluate as core
from evals.core.__main__ import main
from evals.core.evaluate import Settings, judge_item, remarks, score_task, task_figures
from evals.core.prompts import Item, items
from evals.core.tasks import TASKS, Bundle
from evals.items import Partial
from evals.scorer import Prompt, Scores, Source, open_scorer
from records.evals import NOWHERE, About
from records.files import read_lines
from records.items import read_items
from tests.evals.core.core_assets import ROWS, score_one, task, write_bundle, write_laneformer, write_llama
from tests.evals.reference import logits_of, scores_of

LABELS = ["copa", "winograd", "coqa"]


def answer_by_hand(model: torch.nn.Module, item: Item) -> tuple[bool, float]:
    """Whether an item is judge_item right, from one pass over each whole prompt; and how close the call was."""
    if len(item.prompts) == 1:
        ids, start = item.prompts[0]
        best = logits_of(model, ids)[start - 1 : -1].topk(2)
        right = best.indices[:, 0].tolist() == ids[start:]
        return right, float((best.values[:, 0] - best.values[:, 1]).min())
    losses = [-scores_of(model, *prompt).logprobs.mean() for prompt in item.prompts]
    first, second = sorted(losses)[:2]
    return losses[item.gold] == first, second - first


@pytest.mark.parametrize("write", [write_laneformer, write_llama], ids=["engine", "transformers"])
def test_answers_of_each_type_against_plain_sums(tmp_path, write):
    model = write(tmp_path / "model")
    scorer = open_scorer(tmp_path / "model", Source(device="cpu"))
    bundle, choices = write_bundle(tmp_path, LABELS), []
    protocols = ("nanochat", "dclm")
    for protocol in protocols:
        for label in LABELS:
            for chosen in (task(label), dataclasses.replace(task(label), shots=2)):
                right = []
                for item in items(chosen, ROWS[chosen.type], protocol, scorer, scorer.max_length):
                    expected, margin = answer_by_hand(model, item)
                    # float32 on this model is off by about 1e-5; the rows are no ties
                    assert margin > 1e-3
                    right.append(expected)
                answers = score_task(chosen, bundle, Settings(protocol), scorer, Partial())
                assert [answer["right"] for answer in answers] == right
                figures = task_figures(chosen, answers, len(right))
                assert figures["accuracy"] == pytest.approx(sum(right) / len(right), rel=1e-15)
                choices += right if chosen.type != "language_modeling" else []
    assert 0.2 < sum(choices) / len(choices) < 0.8, "a random model is right by chance, not always or never"
    scorer.close()


def test_choices_have_the_lowest_mean_and_texts_every_token():
    logprobs = {5: -1.0, 6: -2.0, 7: -1.6}  # of each id; 5 is greedy
    scorer = SimpleNamespace(text_after=lambda before, new: "ab" * len(new))
    for answers, gold, right, why in (
        ([[5, 6], [7, 7]], 0, True, "means of -1.5 and -1.6"),
        ([[7], [5, 5, 6]], 1, True, "the mean decides: the first has the higher sum, -1.6"),
        ([[5], [5, 5]], 0, True, "the first of equals"),
        ([[5, 5]], 0, True, "every token is the best"),
        ([[5, 6]], 0, False, "one is not"),
        # an option without a token of its own is chosen only when it is the first, as a comparison with nan has it
        ([[5], []], 1, False, "no token, second"),
        ([[], [5]], 0, True, "no token, first"),
    ):
        item = Item([Prompt([1, *answer], 1) for answer in answers], gold)
        values = [np.array([logprobs[i] for i in answer]) for answer in answers]
        scores = [Scores(each, each == logprobs[5]) for each in values]
        assert judge_item(scorer, item, scores)["right"] == right, why


def run(model: Path, bundle: Path, about: About = NOWHERE, **settings):
    return main(model, bundle, Settings(**settings), about=about)


def test_the_command(folder, tmp_path, capsys):
    write_bundle(tmp_path, LABELS)
    out = tmp_path / "run" / "evals.jsonl"
    record = run(folder, tmp_path, limit=3, about=About(out, 7, 70, "phase1"))
    assert read_lines(out) == [record]
    expected = {"kind": "core", "protocol": "nanochat", "seed": 1234, "limit": 3, "step": 7, "core_v2": None}
    assert {name: record[name] for name in expected} == expected
    assert set(record["tasks"]) == set(LABELS)
    assert (record["tasks"]["copa"]["n"], record["tasks"]["copa"]["n_total"]) == (3, 5)
    assert len(record["missing"]) == 19
    assert "copy commonsense_reasoning/piqa.jsonl there" in record["missing"]["piqa"]
    assert "not_core" not in record
    log = capsys.readouterr().err
    assert "19 of 22 tasks are not in this bundle: CORE is not computed." in log
    assert "Missing: hellaswag_zeroshot" in log
    shutil.copy(Path(core.__file__).with_name("demo_bundle") / "NOT_CORE", tmp_path)
    dclm = run(folder, tmp_path, protocol="dclm", tasks="copa")
    assert (dclm["protocol"], list(dclm["tasks"])) == ("dclm", ["copa"])
    assert dclm["missing"]["winograd"] == "not chosen by --tasks"
    assert dclm["not_core"].startswith("not CORE: a toy bundle")
    log = capsys.readouterr().err
    assert "not CORE: a toy bundle" in log
    assert "2 tasks were not chosen by --tasks" in log


def test_an_item_that_does_not_fit_makes_its_task_missing(tmp_path):
    write_laneformer(tmp_path / "model", context=6)
    write_bundle(tmp_path, LABELS)
    record = run(tmp_path / "model", tmp_path)
    assert "coqa" in record["tasks"]
    assert "does not fit into 6" in record["missing"]["copa"]
    lines = remarks(record, Bundle(tmp_path))
    assert any(line.startswith("copa could not be scored: an answer") for line in lines)
    assert record["core_v1"] is None


def test_all_tasks_give_core(folder, tmp_path, monkeypatch):
    bundle, text = write_bundle(tmp_path, [t.label for t in TASKS]), StringIO()
    for module in ("evals.tables", "evals.core.evaluate"):
        monkeypatch.setattr(f"{module}.console", Console(file=text, width=80))
    record = run(folder, tmp_path, protocol="dclm")
    table = text.getvalue()
    assert f"CORE v2  {record['core_v2']:.4f} ± {record['core_v2_se']:.4f}" in table
    for label, figures in record["tasks"].items():
        numbers = rf"{figures['n']} +{figures['accuracy']:.3f} .*{figures['gold_bits_per_byte']:.3f}"
        assert re.search(f"^ *{label} +{numbers} *$", table, re.MULTILINE), "one line of 80 columns"
    assert record["missing"] == {}
    assert len(record["tasks"]) == len(bundle.tasks) == 22
    centered = [figures["centered_v2"] for figures in record["tasks"].values()]
    assert record["core_v2"] == pytest.approx(sum(centered) / 22, abs=1e-12)


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
    """They give the record's figures again, and the gold answer's bits without another pass."""
    bundle, out = write_bundle(tmp_path, LABELS), tmp_path / "run/evals.jsonl"
    record = run(folder, tmp_path, about=About(out, 7))
    head, lines = read_items(out.parent / record["items"])
    assert record["items"].startswith("items/core-7-")
    assert (head["model_sha256"], head["data_sha256"]) == (record["model_sha256"], record["data_sha256"])
    scorer = open_scorer(folder, Source(device="cpu"))
    for label, figures in record["tasks"].items():
        own = [line for (name, _), line in lines.items() if name == label]
        assert task_figures(task(label), own, figures["n_total"]) == figures
        nats = size = 0.0
        rows = items(task(label), bundle.rows(task(label)), "nanochat", scorer, scorer.max_length)
        for item, line in zip(rows, own, strict=True):
            scores = [score_one(scorer, *prompt).logprobs for prompt in item.prompts]
            assert line["losses"] == pytest.approx([-each.mean() for each in scores], rel=1e-6)
            gold = item.gold if len(scores) > 1 else 0
            ids, start = item.prompts[gold]
            text = scorer._tokenizer.decode(ids[start:])
            assert line["bytes"] - len(text.encode()) in (0, 1), "a space"
            nats -= scores[gold].sum()
            size += line["bytes"]
        assert figures["gold_bits_per_byte"] == pytest.approx(nats / np.log(2) / size, rel=1e-12)
    scorer.close()
    again = run(folder, tmp_path, about=About(out, 7))
    assert again["items"] == record["items"], "named by its content"


def test_bad_input(folder, tmp_path):
    write_bundle(tmp_path, ["copa"])
    with pytest.raises(ValueError, match="--limit 0 must be at least 1"):
        Settings(limit=0)
    with pytest.raises(ValueError, match="are not in CORE"):
        run(folder, tmp_path, tasks="mmlu")
    with pytest.raises(ValueError, match="holds none of CORE's tasks"):
        main(folder, tmp_path / "nothing")
