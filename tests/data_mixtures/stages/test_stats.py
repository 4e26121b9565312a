"""Statistics: counted again by hand, from the texts."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

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

NOTES, SUMS = texts_of(150), texts_of(90, seed=1)
ODDS = [f"odd {i} <b> & so" for i in range(90)]
TEXTS = {"notes": NOTES, "sums": [*SUMS, *NOTES[40:80]], "odds": [*ODDS, *NOTES[60:90], *SUMS[:20]]}
SOURCES = tuple(TEXTS)


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setattr(sorted_runs, "DOCUMENTS_PER_RANGE", 50)
    return prepared(tmp_path / "data", plan_of(SOURCES, windows_per_shard=40), TEXTS, units=3)


def test_counts_are_those_of_the_texts_and_epochs_those_that_the_mixture_serves(data):
    console = Console(record=True, width=160)
    found = stats.write(data, SOURCES, console, sequences={"phase1": 60})
    assert read_json(data / "stats.json") == found
    for source in SOURCES:
        facts, unique = found["sources"][source], set(TEXTS[source])
        assert facts["documents"] == len(unique)
        assert facts["tokens"] == sum(len(tokens_of(text)) for text in unique)
        assert facts["dropped"]["duplicate"] == len(TEXTS[source]) - len(unique)
        sizes = np.array([len(tokens_of(text)) for text in unique_train(TEXTS[source], plan_of())])
        lengths = sizes[np.cumsum(sizes) - sizes < facts["windows"] * 8]
        expected = Counter(int(length).bit_length() - 1 for length in lengths)
        assert {k: n for k, n in enumerate(facts["lengths"]["histogram"]) if n} == dict(expected)
        assert facts["lengths"]["longest"] == max(lengths)
        assert facts["lengths"]["mean"] == round(float(np.mean(lengths)), 2)

    pairs = {tuple(pair["sources"]): pair["documents"] for pair in found["shared_documents"]["pairs"]}
    sets = {source: set(texts) for source, texts in TEXTS.items()}
    assert pairs == {(a, b): len(sets[a] & sets[b]) for a, b in combinations(SOURCES, 2)}
    assert len(set.intersection(*sets.values())) > 5, "one document in three sources is three pairs"

    mixture, phase = Mixture.open(data / "phase1.lock.json"), found["phases"]["phase1"]
    served = Counter(mixture.source_names[i] for i in mixture.sequences(0, 60)[1])
    windows = {source: shards.read_manifest(data / source)["windows"] for source in SOURCES}
    epochs = {source: round(served[source] / windows[source], 4) for source in SOURCES}
    assert phase["epochs_at_end"] == epochs
    assert phase["shares"] == {"notes": 1 / 6, "sums": 2 / 6, "odds": 3 / 6}

    printed = console.export_text()
    for title in ("Categories", "Sources", "Lengths of documents", "Dropped", "Documents that sources share"):
        assert title in printed
    row = next(line.split() for line in printed.splitlines() if line.split()[:1] == ["odds"])
    assert row[3:7] == ["50.00", "%", f"{epochs['odds']:.3f}", str(windows["odds"])]


def test_what_cannot_be_counted_is_said(data):
    with pytest.raises(ValueError, match="phase in sequences: 'phase3'; did you mean 'phase1'"):
        stats.write(data, SOURCES, Console(quiet=True), sequences={"phase3": 1})
    stage.free(data, "tokenize", Unit("sums", 1))
    console = Console(record=True, width=160)
    unknown = stats.write(data, SOURCES, console)["shared_documents"]["unknown"]
    assert "sums/unit-00001 is not there any more" in unknown
    assert "Not counted: " in console.export_text()
