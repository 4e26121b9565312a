"""Statistics: counted again by hand, from the texts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from rich.console import Console

from data_mixtures import shards
from data_mixtures.mixture import Mixture
from data_mixtures.stages import sorted_runs, stage, stats
from data_mixtures.stages.stage import Unit
from tests.data_mixtures.stages.shuffle_assets import (
    plan_of,
    prepared,
    read_json,
    texts_of,
    tokens_of,
    unique_train,
)

SOURCES = ("notes", "sums", "odds")
TEXTS = {
    "notes": texts_of(150),
    "sums": [*texts_of(90, seed=1), *texts_of(150)[40:80]],
    "odds": [*(f"odd {i} <b> & so" for i in range(90)), *texts_of(150)[60:90], *texts_of(90, seed=1)[:20]],
}


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setattr(sorted_runs, "DOCUMENTS_PER_RANGE", 50)
    return prepared(tmp_path / "data", plan_of(SOURCES, windows_per_shard=40), TEXTS, units=3)


def write(data, **options):
    return stats.write(data, SOURCES, Console(quiet=True), **options)


def test_counts(data):
    found = write(data, sequences={"phase1": 60})
    assert read_json(data / "stats.json") == found
    for source in SOURCES:
        facts, unique = found["sources"][source], set(TEXTS[source])
        assert facts["documents"] == len(unique)
        assert facts["tokens"] == sum(len(tokens_of(text)) for text in unique)
        assert facts["dropped"]["duplicate"] == len(TEXTS[source]) - len(unique)
        train = unique_train(TEXTS[source], plan_of())
        ends = np.cumsum([len(tokens_of(text)) for text in train])
        begins = ends - [len(tokens_of(text)) for text in train]
        lengths = (ends - begins)[begins < facts["windows"] * 8]
        expected = Counter(int(length).bit_length() - 1 for length in lengths)
        assert {k: n for k, n in enumerate(facts["lengths"]["histogram"]) if n} == dict(expected)
        assert facts["lengths"]["longest"] == max(lengths)
        assert facts["lengths"]["mean"] == round(float(np.mean(lengths)), 2)


def test_shared_documents_are_counted_exactly(data):
    pairs = {tuple(pair["sources"]): pair["documents"] for pair in write(data)["shared_documents"]["pairs"]}
    sets = {source: set(texts) for source, texts in TEXTS.items()}
    expected = {
        (a, b): len(sets[a] & sets[b]) for a, b in (("notes", "sums"), ("notes", "odds"), ("sums", "odds"))
    }
    assert pairs == {pair: count for pair, count in expected.items() if count}
    assert (
        len(sets["notes"] & sets["sums"] & sets["odds"]) > 5
    )  # so one document in three sources is three pairs


def test_shared_documents_are_unknown_when_units_are_freed(data):
    stage.free(data, "tokenize", Unit("sums", 1))
    console = Console(record=True, width=160)
    found = stats.write(data, SOURCES, console)["shared_documents"]["unknown"]
    assert "sums/unit-00001 is not there any more" in found
    assert "Not counted: " in console.export_text()


def test_epochs_are_those_that_the_mixture_serves(data):
    mixture = Mixture.open(data / "phase1.lock.json")
    found = write(data, sequences={"phase1": 60})["phases"]["phase1"]
    served = Counter(mixture.source_names[i] for i in mixture.sequences(0, 60)[1])
    windows = {source: shards.read_manifest(data / source)["windows"] for source in SOURCES}
    assert found["epochs_at_end"] == {
        source: round(served[source] / windows[source], 4) for source in SOURCES
    }
    assert found["shares"] == {"notes": 1 / 6, "sums": 2 / 6, "odds": 3 / 6}
    with pytest.raises(ValueError, match="phase in sequences: 'phase3'; did you mean 'phase1'"):
        write(data, sequences={"phase3": 1})


def test_the_terminal_shows_it(data):
    console = Console(record=True, width=160)
    found = stats.write(data, SOURCES, console, sequences={"phase1": 60})
    printed = console.export_text()
    for title in ("Categories", "Sources", "Lengths of documents", "Dropped", "Documents that sources share"):
        assert title in printed
    row = next(line.split() for line in printed.splitlines() if line.split()[:1] == ["odds"])
    epochs, windows = found["phases"]["phase1"]["epochs_at_end"]["odds"], found["sources"]["odds"]["windows"]
    assert row[3:7] == ["50.00", "%", f"{epochs:.3f}", str(windows)]
