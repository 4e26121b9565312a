"""Tests that an interrupted evaluation keeps its work and ends with the same bytes."""

import pytest

from evals.core.__main__ import main
from evals.core.evaluate import Settings
from evals.items import WINDOW, open_partial
from evals.scorer import Answerer
from evals.scorer.engine import EngineScorer
from records.evals import About
from records.files import read_lines
from tests.evals.core.core_assets import CHOICE_ROWS, task, write_bundle
from tests.records.lines import write_lines

ITEMS, ENDS_AFTER = 300, 280


def test_an_evaluation_goes_on_where_it_ended_with_the_same_bytes(folder, tmp_path, monkeypatch):
    bundle = tmp_path / "bundle"
    score = EngineScorer.score
    scored = []
    rows = [
        row | {"query": f"{i} {row['query']}"} for i, row in enumerate(CHOICE_ROWS * (ITEMS // 5))
    ]
    write_lines(write_bundle(bundle, ["copa"]).file(task("copa")), rows)

    def count(self, items):
        for scores in score(self, items):
            scored.append(scores)
            if len(scored) == ENDS_AFTER:
                raise KeyboardInterrupt
            yield scores

    def evaluate(name):
        record = main(
            folder, bundle, Settings(), Answerer(device="cpu"), About(tmp_path / name / "x", 10)
        )
        assert [record] == read_lines(tmp_path / name / "x")
        return record["tasks"], (tmp_path / name / record["items"]).read_bytes()

    whole = evaluate("whole")
    monkeypatch.setattr(EngineScorer, "score", count)
    with pytest.raises(KeyboardInterrupt):
        evaluate("again")
    assert evaluate("again") == whole
    # only what was not kept is asked again
    assert len(scored) == ENDS_AFTER + ITEMS - WINDOW
    # nothing else stays
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == ["items", "x"]


def test_half_a_window_left_by_a_crash_is_asked_again(tmp_path):
    answered = []

    def answer(items):
        for item in items:
            answered.append(item)
            yield item / 3

    first = open_partial(tmp_path / "evals.jsonl", "core", "model")
    assert first.path is not None
    assert first.complete("copa", range(4), answer, together=2) == [0, 1 / 3, 2 / 3, 1.0]
    # the second write was cut, as by a crash in the middle of it
    lines = first.path.read_text().splitlines()
    first.path.write_text(f"{lines[0]}\n{lines[1][:20]}")
    answered.clear()
    for _ in range(2):
        reopened = open_partial(tmp_path / "evals.jsonl", "core", "model")
        assert reopened.complete("copa", range(4), answer, together=2) == [0, 1 / 3, 2 / 3, 1.0]
    assert answered == [2, 3]
    assert open_partial(tmp_path / "evals.jsonl", "core", "another model").answers == {}
    reopened.remove()
    assert not list(tmp_path.iterdir())
