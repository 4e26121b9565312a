"""Runs, order and shuffle: the bytes of the in-memory way, whatever the units, runs, ranges and
pieces; opens that grow with the source and not its square; damage and what is missing by name.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_mixtures.stages import blocks, shuffle, sorted_runs, stage
from tests.data_mixtures.conftest import flip
from tests.data_mixtures.stages import shuffle_assets
from tests.data_mixtures.stages.shuffle_assets import (
    in_memory,
    plan_of,
    run,
    shuffled,
    shuffled_files,
    split,
    texts_of,
    tokenized,
)

PLAN = plan_of(windows_per_shard=20)
STAGES = (sorted_runs.Runs, shuffle.OrderDocuments, shuffle.WriteShards)


def set_sizes(patch: pytest.MonkeyPatch, documents=13, read=200, copied=100, block=16) -> None:
    """Ranges and pieces so small that a few texts need many of them."""
    patch.setattr(sorted_runs, "DOCUMENTS_PER_RANGE", documents)
    for name, size in (("READ_BYTES", read), ("COPY_BYTES", copied), ("BLOCK_BYTES", block)):
        patch.setattr(blocks, name, size)
    patch.setattr(os, "fsync", lambda file: None)  # hundreds of tiny files


@pytest.fixture
def tiny(monkeypatch):
    set_sizes(monkeypatch)
    monkeypatch.setattr(sorted_runs, "RUNS", 3)


def stages_of(out: Path, plan=PLAN) -> list[stage.Stage]:
    return [kind(plan, out, ("notes",)) for kind in STAGES]


def run_all(stages: list[stage.Stage]) -> None:
    for each in stages:
        run(each)


def is_all_done(*stages: stage.Stage) -> bool:
    return all(stage.is_done(each, unit) for each in stages for unit in each.units())


@pytest.mark.parametrize(
    ("units", "made", "dtype"),
    [
        (3, ("tokenize", 3), "<u2"),
        (11, ("runs", 3), "<u2"),
        (5, ("runs", 3), "<u4"),
    ],
)
def test_bytes_are_those_of_the_in_memory_way_for_any_units_and_runs(
    tmp_path, tiny, monkeypatch, units, made, dtype
):
    """Origins of documents among them."""
    monkeypatch.setattr(shuffle_assets, "TOKEN", np.dtype(dtype))
    texts = texts_of(200)
    shuffled(tmp_path, PLAN, {"notes": texts}, units)
    name, made_of = sorted_runs.made_by(tmp_path, "notes")
    assert (name, len(made_of)) == made
    files = shuffled_files(tmp_path, "notes")
    assert len(files) > 20
    assert files == in_memory(texts, PLAN)
    ranges = sorted_runs.ranges_of(tmp_path, "notes")
    assert len(ranges) == -(-200 // 13)  # of the documents, not of the units
    counts = stage.counts(tmp_path, "order", "notes", len(ranges))
    assert sum(each["duplicate"] for each in counts) == 200 - len(set(texts))
    assert sum(each["documents"] for each in counts) == 200


@settings(max_examples=15)
@given(
    texts=st.lists(st.text("ab\n\u00fc", max_size=12), min_size=30, max_size=80),
    units=st.integers(1, 6),
    seq_len=st.integers(1, 9),
    windows_per_shard=st.integers(20, 200),
    documents=st.integers(7, 90),
    read=st.integers(1, 400),
    copied=st.integers(1, 400),
    block=st.integers(1, 40),
)
def test_any_sizes(texts, units, seq_len, windows_per_shard, documents, read, copied, block):
    texts += [f"{i}" for i in range(60)]  # enough for a window of each part
    plan = plan_of(("notes",), seq_len, windows_per_shard)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        set_sizes(patch, documents, read, copied, 2 * block)
        shuffled(Path(folder), plan, {"notes": texts}, units)
        assert shuffled_files(Path(folder), "notes") == in_memory(texts, plan)


def test_the_comparison_sees_a_wrong_order(tmp_path, tiny, monkeypatch):
    # the planted error: a range that takes its units one after the other instead of merging them
    def concatenate(parts):
        return sorted_runs.first_of_equals(np.concatenate(parts))

    monkeypatch.setattr(sorted_runs, "merge", concatenate)
    shuffled(tmp_path, PLAN, {"notes": texts_of(200)}, 3)
    assert shuffled_files(tmp_path, "notes") != in_memory(texts_of(200), PLAN)


def test_what_is_done_stays_done_until_something_before_it_changes(tmp_path, tiny):
    texts = split(texts_of(100), 4)
    tokenized(tmp_path, "notes", texts)
    done = runs, order, work = stages_of(tmp_path)
    run_all(done)
    assert is_all_done(*done)
    assert not any(stage.is_done(stages_of(tmp_path, plan_of(seq_len=9))[2], unit) for unit in work.units())
    other_order = stages_of(tmp_path, plan_of(valid_per_10000=1501))[1]
    assert not any(stage.is_done(other_order, unit) for unit in order.units())
    tokenized(tmp_path, "notes", (*texts[:3], (*texts[3], "one more")))
    assert [unit.number for unit in runs.units() if not stage.is_done(runs, unit)] == [1]
    run(runs)
    documents = np.load(tmp_path / "runs/notes/unit-00001/documents.npy")
    assert len(documents) == len(texts[2]) + len(texts[3]) + 1
    assert not any(stage.is_done(each, unit) for each in (order, work) for unit in each.units())


def test_too_little_text_is_named(tmp_path):
    tokenized(tmp_path, "notes", ((), ()))
    with pytest.raises(ValueError, match=r"source 'notes' is empty.*filter/notes/unit-\*/receipt\.json"):
        shuffle.OrderDocuments(PLAN, tmp_path, ("notes",)).units()
    tokenized(tmp_path, "notes", split(["a"], 2))
    _, order, work = stages_of(tmp_path, plan_of(valid_per_10000=1))
    run(order)
    with pytest.raises(ValueError, match=r"'notes' has too little text for one training window of 8 tokens"):
        work.units()


@pytest.mark.parametrize(("units", "made"), [(2, "tokenize"), (4, "runs")])
def test_a_flipped_bit_before_a_shard_stops_it_and_mends_itself(tmp_path, tiny, units, made):
    plan, parts = plan_of(valid_per_10000=3000), split(texts_of(100), units)
    for name in ("tokens.bin", "documents.npy", "origins.bin", "tokens.bin.xxh3"):
        out = tmp_path / name
        tokenized(out, "notes", parts)
        stages = stages_of(out, plan)
        if made == "runs":
            run(stages[0])
        folder = out / made / "notes/unit-00001"
        flip(folder / name)
        broken = rf"{name.removesuffix('.xxh3')} is not what '{made}' wrote"
        with pytest.raises(ValueError, match=broken) as error:
            run_all(stages[made == "runs" :])
        assert "\n" not in str(error.value)
        assert str(folder) in str(error.value)
        assert not (folder / stage.RECEIPT).is_file()  # so it is made again
        assert not list((out / "shuffle/notes").glob(".*"))
        tokenized(out, "notes", parts)
        run_all(stages)
        assert shuffled_files(out, "notes") == in_memory(texts_of(100), plan)


def test_damage_of_the_order_stops_what_reads_it(tmp_path, tiny):
    shuffled(tmp_path, PLAN, {"notes": texts_of(100)})
    for part in ("train", "valid"):
        path = tmp_path / f"order/notes/unit-00002/{part}.npy"
        whole, receipt = path.read_bytes(), path.with_name(stage.RECEIPT).read_bytes()
        flip(path, -3)
        named = rf"order/notes/unit-00002/{part}\.npy is not what 'order' wrote"
        with pytest.raises(ValueError, match=named):
            run(shuffle.WriteShards(PLAN, tmp_path, ("notes",)))
        path.write_bytes(whole)
        path.with_name(stage.RECEIPT).write_bytes(receipt)
