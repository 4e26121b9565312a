"""CORE from rows to record, by real small models: answers against plain log-softmax
sums, missing tasks, resuming.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from evals.core import evaluate as core
from evals.core.__main__ import main
from evals.core.evaluate import Settings, answered, remarks, score_task, task_figures
from evals.core.prompts import Item, Protocol, items
from evals.core.tasks import TASKS, Bundle, Task
from evals.items import Partial
from evals.scorer import Prompt, Scorer, Scores, Source, open_scorer
from evals.scorer.engine import EngineScorer
from evals.scorer.hf import PASS_TOKENS, WORTH_A_PASS, TransformersScorer
from laneformer import Laneformer
from records.evals import NOWHERE, About
from records.items import read_items
from tests.evals.core.core_assets import ROWS, score_one, task, write_bundle, write_laneformer, write_llama
from tests.evals.lm_eval.lm_eval_assets import toy_server

LABELS = ["copa", "winograd", "coqa"]


@torch.no_grad()
def right_by_hand(model: torch.nn.Module, item: Item) -> tuple[bool, float]:
    """Whether an item is answered right, by one pass over each whole prompt in float64; and how
    close the call was.
    """
    losses, leads = [], []
    for prompt in item.prompts:
        found = model(torch.tensor([prompt.ids]))
        logits = getattr(found, "logits", found)[0]
        logp = torch.log_softmax(logits, -1)
        total = 0.0
        for position in range(prompt.start, len(prompt.ids)):
            total -= float(logp[position - 1, prompt.ids[position]])
            others = logp[position - 1].clone()
            others[prompt.ids[position]] = -np.inf
            leads.append(float(logp[position - 1, prompt.ids[position]] - others.max()))
        losses.append(total / (len(prompt.ids) - prompt.start))
    if len(losses) == 1:
        return all(lead > 0 for lead in leads), min(abs(lead) for lead in leads)
    ordered = sorted(losses)
    return losses[item.gold] == ordered[0], ordered[1] - ordered[0]


def few_shot(label: str) -> Task:
    return dataclasses.replace(task(label), shots=2)


@pytest.mark.parametrize("write", [write_laneformer, write_llama], ids=["engine", "transformers"])
def test_answers_of_each_type_against_plain_sums(tmp_path: Path, write: Any) -> None:
    model = write(tmp_path / "model").double()
    scorer = open_scorer(tmp_path / "model", Source(device="cpu"))
    bundle = write_bundle(tmp_path, LABELS)
    outcomes = []
    for protocol in ("nanochat", "dclm"):
        for label in LABELS:
            for chosen in (task(label), few_shot(label)):
                right = []
                for item in items(chosen, ROWS[chosen.type], protocol, scorer, scorer.max_length):
                    expected, margin = right_by_hand(model, item)
                    # float32 on this model is off by about 1e-5; the rows are no ties
                    assert margin > 1e-3
                    assert is_right(scorer, item) == expected
                    right.append(expected)
                figures = task_figures(
                    chosen, score_task(chosen, bundle, protocol, scorer, None, Partial()), len(right)
                )
                assert figures["accuracy"] == pytest.approx(sum(right) / len(right), rel=1e-15)
                assert figures["n"] == figures["n_total"] == len(right)
                outcomes += right if chosen.type != "language_modeling" else []
    assert 0.2 < sum(outcomes) / len(outcomes) < 0.8, "a random model is right by chance, not always or never"
    scorer.close()


def is_right(scorer: Scorer, item: Item) -> bool:
    (scores,) = scorer.score([item.prompts])
    return bool(answered(scorer, item, scores)["right"])


class Favourite:
    """Likes some ids: log p of each is what the table says, and an id is greedy if it is the table's best."""

    def __init__(self, table: dict[int, float]):
        self.table = table

    def score(self, items: Any) -> Any:
        for item in items:
            found = [np.array([self.table[i] for i in ids[start:]], dtype=np.float64) for ids, start in item]
            yield [Scores(logprobs, logprobs == max(self.table.values())) for logprobs in found]

    def text_after(self, before: list[int], new: list[int]) -> str:
        return "ab" * len(new)


def test_choices_have_the_lowest_mean_and_texts_every_token() -> None:
    model: Any = Favourite({5: -1.0, 6: -2.0, 7: -1.6})
    # means -1.5 and -1.6
    assert is_right(model, Item([Prompt([1, 5, 6], 1), Prompt([1, 7, 7], 1)], gold=0))
    # the mean decides, not the sum: -1.6 of one token has the higher sum, -1.33 of three the lower mean loss
    assert is_right(model, Item([Prompt([1, 7], 1), Prompt([1, 5, 5, 6], 1)], gold=1))
    assert is_right(model, Item([Prompt([1, 5], 1), Prompt([1, 5, 5], 1)], gold=0)), "the first of equals"
    assert is_right(model, Item([Prompt([1, 5, 5], 1)], gold=0))
    assert not is_right(model, Item([Prompt([1, 5, 6], 1)], gold=0))
    # an option without a token of its own is chosen only when it is the first, as a comparison with
    # nan has it
    assert not is_right(model, Item([Prompt([1, 5], 1), Prompt([1], 1)], gold=1))
    assert is_right(model, Item([Prompt([1], 1), Prompt([1, 5], 1)], gold=0))


def run(model: Path, bundle: Path, about: About = NOWHERE, **settings: Any) -> dict[str, Any]:
    return main(model, bundle, Settings(**settings), about=about)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    assert isinstance(write_laneformer(folder), Laneformer)
    return folder


def test_the_command(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bundle(tmp_path, LABELS)
    out = tmp_path / "run" / "evals.jsonl"
    record = run(model_dir, tmp_path, limit=3, about=About(out, 7, 70, "phase1"))
    assert [json.loads(line) for line in out.read_text().splitlines()] == [record]
    assert sorted(out.parent.iterdir()) == [out, out.parent / "items"], "nothing else stays"
    assert (record["kind"], record["protocol"], record["seed"], record["limit"]) == (
        "core",
        "nanochat",
        1234,
        3,
    )
    assert (record["step"], record["tokens_total"], record["phase"]) == (7, 70, "phase1")
    assert [record[name] for name in ("core_v1", "core_v2", "core_v1_se", "core_v2_se")] == [None] * 4
    assert set(record["tasks"]) == set(LABELS)
    assert record["tasks"]["copa"]["n"] == 3
    assert record["tasks"]["copa"]["n_total"] == 5
    assert len(record["missing"]) == 19
    assert "copy commonsense_reasoning/piqa.jsonl there" in record["missing"]["piqa"]
    assert len(record["data_sha256"]) == len(record["tokenizer_sha256"]) == 64
    assert "not_core" not in record
    said = capsys.readouterr().err
    assert "19 of 22 tasks are not in this bundle: CORE is not computed." in said
    assert "Missing: hellaswag_zeroshot" in said
    assert "N/A" not in said
    shutil.copy(Path(core.__file__).with_name("demo_bundle") / "NOT_CORE", tmp_path)
    dclm = run(model_dir, tmp_path, protocol="dclm", tasks="copa")
    assert (dclm["protocol"], list(dclm["tasks"])) == ("dclm", ["copa"])
    assert dclm["missing"]["winograd"] == "not chosen by --tasks"
    assert dclm["not_core"].startswith("not CORE: a toy bundle")
    said = capsys.readouterr().err
    assert "not CORE: a toy bundle" in said
    assert "2 tasks were not chosen by --tasks" in said
    assert "Missing" not in said


def test_an_item_that_does_not_fit_makes_its_task_missing(tmp_path: Path) -> None:
    write_laneformer(tmp_path / "model", context=6)
    write_bundle(tmp_path, LABELS)
    record = run(tmp_path / "model", tmp_path)
    assert "coqa" in record["tasks"]
    assert "does not fit into 6" in record["missing"]["copa"]
    assert any(
        line.startswith("copa could not be scored: an answer") for line in remarks(record, Bundle(tmp_path))
    )
    assert record["core_v1"] is None


def test_all_tasks_give_core(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, terminal = write_bundle(tmp_path, [t.label for t in TASKS]), Console(file=StringIO(), width=80)
    for module in ("evals.tables", "evals.core.evaluate"):
        monkeypatch.setattr(f"{module}.console", terminal)
    record = run(model_dir, tmp_path, protocol="dclm")
    said = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert f"CORE v2  {record['core_v2']:.4f} ± {record['core_v2_se']:.4f}" in said
    for label, figures in record["tasks"].items():
        numbers = (
            rf" *{label} +{figures['n']} +{figures['accuracy']:.3f} .*{figures['gold_bits_per_byte']:.3f} *"
        )
        assert re.search(f"^{numbers}$", said, re.MULTILINE), "a line of 80 columns for each task"
    assert record["missing"] == {}
    assert len(record["tasks"]) == len(bundle.tasks) == 22
    for version in ("v1", "v2"):
        centered = [t[f"centered_{version}"] for t in record["tasks"].values()]
        assert record[f"core_{version}"] == pytest.approx(sum(centered) / 22, abs=1e-12)
    assert record["core_v2"] != record["core_v1"]


def test_an_interrupted_evaluation_goes_on(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bundle(tmp_path / "data", LABELS)
    out, whole = tmp_path / "evals.jsonl", run(model_dir, tmp_path / "data")
    asked, score, most = list[int](), EngineScorer.score, 8  # the five of copa and three of winograd

    def interrupted(self: EngineScorer, left: Any) -> Any:
        for found in score(self, left):
            if len(asked) == most:
                raise KeyboardInterrupt
            asked.append(len(found))
            yield found

    monkeypatch.setattr(EngineScorer, "score", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(model_dir, tmp_path / "data", about=About(out))
    assert not out.exists()
    assert len(list(tmp_path.glob(".evals.jsonl.core-*.jsonl"))) == 1
    most = 99
    # another protocol has other figures, and does not take them
    run(model_dir, tmp_path / "data", protocol="dclm", tasks="copa")
    assert len(asked) == 8 + 5
    record = run(model_dir, tmp_path / "data", about=About(out))
    assert len(asked) == 8 + 5 + 4 + 6, "winograd and coqa, of copa nothing"
    assert record["tasks"] == whole["tasks"]
    assert not list(tmp_path.glob(".evals.jsonl.core-*"))


@pytest.mark.parametrize("change", ["model", "data"])
def test_kept_tasks_of_another_model_or_data_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    write_laneformer(tmp_path / "model")
    bundle = write_bundle(tmp_path / "data", ["copa"])
    out = tmp_path / "evals.jsonl"
    monkeypatch.setattr(Partial, "remove", lambda self: None)
    run(tmp_path / "model", tmp_path / "data", about=About(out))
    changed = tmp_path / "model" / "config.json" if change == "model" else bundle.file(task("copa"))
    changed.write_text(changed.read_text() + "\n")
    run(tmp_path / "model", tmp_path / "data", about=About(out))
    assert len(list(tmp_path.glob(".evals.jsonl.core-*.jsonl"))) == 2


@pytest.mark.parametrize("protocol", ["nanochat", "dclm"])
def test_the_plan_counts_what_the_engine_reads(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], protocol: Protocol
) -> None:
    bundle = write_bundle(tmp_path, LABELS)
    got = main(model_dir, tmp_path, Settings(protocol=protocol), plan_only=True, tokens_per_s=1000.0)
    assert "at 1,000 tokens/s" in capsys.readouterr().err
    scorer = EngineScorer(model_dir, device="cpu")
    asked = whole = fresh = 0
    for chosen in (task(label) for label in got["tasks"]):
        for item in items(chosen, bundle.rows(chosen), protocol, scorer, 128):
            asked += 1
            for prompt in item.prompts:
                score_one(scorer, *prompt)
                whole += len(prompt.ids) - 1
                fresh += len(prompt.ids) - 1 - scorer.engine.statistics.reused_tokens
    scorer.close()
    assert (got["items"], got["tokens"], got["tokens_shared"]) == (asked, whole, fresh)
    assert fresh < whole
    assert set(got["missing"]) == set(bundle.chosen([t.label for t in TASKS])[1])


def test_the_plan_counts_the_passes_that_transformers_makes(
    model_dir: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    bundle = write_bundle(tmp_path, LABELS)
    got = main(model_dir, tmp_path, plan_only=True)
    scorer = TransformersScorer(model_dir, "cpu")
    for limits in (PASS_TOKENS, WORTH_A_PASS):
        monkeypatch.setitem(limits, "cpu", limits["cuda"])  # the plan is of a GPU
    read = []
    forward = scorer._model.forward
    scorer._few_logits = False  # the spy's signature is not the model's
    scorer._model.forward = lambda input_ids, **given: (
        read.append(input_ids.numel()) or forward(input_ids, **given)
    )
    for label in got["tasks"]:
        score_task(task(label), bundle, "nanochat", scorer, None, Partial())
    assert (got["passes"], got["tokens_packed"]) == (len(read), sum(read))


def test_the_answer_to_every_item_is_kept(model_dir: Path, tmp_path: Path) -> None:
    """They give the record's figures again, and the gold answer's bits without another pass."""
    bundle, out = write_bundle(tmp_path, LABELS), tmp_path / "run/evals.jsonl"
    record = run(model_dir, tmp_path, about=About(out, 7))
    head, lines = read_items(out.parent / record["items"])
    assert record["items"].startswith("items/core-7-")
    assert (head["model_sha256"], head["data_sha256"]) == (record["model_sha256"], record["data_sha256"])
    scorer = open_scorer(model_dir, Source(device="cpu"))
    for label, figures in record["tasks"].items():
        own = [line for (name, _), line in lines.items() if name == label]
        assert task_figures(task(label), own, figures["n_total"]) == figures
        bits = size = 0.0
        rows = list(items(task(label), bundle.rows(task(label)), "nanochat", scorer, scorer.max_length))
        for item, line in zip(rows, own, strict=True):
            gold = item.prompts[item.gold if len(item.prompts) > 1 else 0]
            bits -= score_one(scorer, *gold).logprobs.sum() / np.log(2)
            losses = [-score_one(scorer, *prompt).logprobs.mean() for prompt in item.prompts]
            assert line["losses"] == pytest.approx(losses, rel=1e-6)
            size += line["bytes"]
            text = scorer._tokenizer.decode(gold.ids)
            assert (
                text.encode()[-line["bytes"] :].decode().strip()
                == scorer._tokenizer.decode(gold.ids[gold.start :]).strip()
            )
        assert figures["gold_bits_per_byte"] == pytest.approx(bits / size, rel=1e-12)
    scorer.close()
    again = run(model_dir, tmp_path, about=About(out, 7))
    assert again["items"] == record["items"], "named by its content"


def test_a_server_answers_as_the_engine_does(model_dir: Path, tmp_path: Path) -> None:
    """The third way to ask a model, as `--base-url`; only its context is a token shorter."""
    write_bundle(tmp_path, LABELS)
    served = EngineScorer(model_dir, "cpu", context_tokens=512)
    with toy_server(served.engine) as url:
        theirs = main(model_dir, tmp_path, source=Source(base_url=url, max_length=127))
    served.close()
    ours = main(model_dir, tmp_path, source=Source("engine", "cpu", max_length=127))
    assert (theirs["backend"], theirs["device"], theirs["dtype"]) == ("endpoint", url, None)
    assert theirs["model_sha256"] == ours["model_sha256"]
    assert theirs["tasks"] == ours["tasks"]


def test_bad_input(model_dir: Path, tmp_path: Path) -> None:
    write_bundle(tmp_path, ["copa"])
    with pytest.raises(ValueError, match="--limit 0 must be at least 1"):
        Settings(limit=0)
    with pytest.raises(ValueError, match="are not in CORE"):
        run(model_dir, tmp_path, tasks="mmlu")
    with pytest.raises(ValueError, match="holds none of CORE's tasks"):
        main(model_dir, tmp_path / "nothing")
