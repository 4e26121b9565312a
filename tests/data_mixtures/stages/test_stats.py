"""Tests of statistics, counted again from the texts."""

from __future__ import annotations

from itertools import combinations

import pytest
from rich.console import Console

from data_mixtures.stages import sorted_runs, stage, stats
from data_mixtures.stages.stage import Unit
from tests.data_mixtures.stages.shuffle_assets import (
    plan_of,
    prepare_texts,
    read_json,
    texts_of,
    tokens_of,
)

NOTES, SUMS = texts_of(150), texts_of(90, seed=1)
ODDS = [f"odd {i} <b> & so" for i in range(90)]
TEXTS = {"notes": NOTES, "sums": [*SUMS, *NOTES[40:80]], "odds": [*ODDS, *NOTES[60:90], *SUMS[:20]]}
SOURCES = tuple(TEXTS)


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setattr(sorted_runs, "DOCUMENTS_PER_RANGE", 50)
    return prepare_texts(tmp_path / "data", plan_of(SOURCES, windows_per_shard=40), TEXTS, units=3)


def test_counts_are_those_of_the_texts(data):
    console = Console(record=True, width=160)
    statistics = stats.write(data, SOURCES, console, workers=2)
    assert read_json(data / "stats.json") == statistics
    for source in SOURCES:
        facts = statistics["sources"][source]
        unique = set(TEXTS[source])
        assert facts["documents"] == len(unique)
        assert facts["tokens"] == sum(len(tokens_of(text)) for text in unique)
        assert facts["dropped"]["duplicate"] == len(TEXTS[source]) - len(unique)
        sizes = [len(tokens_of(text)) for text in unique]
        assert (facts["longest"], facts["mean"]) == (max(sizes), round(sum(sizes) / len(sizes), 2))

    pairs = {
        tuple(pair["sources"]): pair["documents"]
        for pair in statistics["shared_documents"]["pairs"]
    }
    # documents are shared when their texts are equal
    sets = {source: set(texts) for source, texts in TEXTS.items()}
    assert pairs == {(a, b): len(sets[a] & sets[b]) for a, b in combinations(SOURCES, 2)}
    assert len(set.intersection(*sets.values())) > 5, "one document in three sources is three pairs"

    assert statistics["phases"]["phase1"]["shares"] == {
        "notes": 1 / 6,
        "sums": 2 / 6,
        "odds": 3 / 6,
    }
    printed = console.export_text()
    for title in ("Sources", "Shares", "Dropped", "Documents that sources share"):
        assert title in printed
    # the share of odds in phase1, 3 of 6
    assert any(line.split()[-1:] == ["50.00%"] for line in printed.splitlines() if "odds" in line)


def test_what_cannot_be_counted_is_said(data):
    stage.free(data, "tokenize", Unit("sums", 1))
    console = Console(record=True, width=160)
    unknown = stats.write(data, SOURCES, console, 1)["shared_documents"]["unknown"]
    assert "sums/unit-00001 was freed" in unknown
    assert "not counted: " in console.export_text()
