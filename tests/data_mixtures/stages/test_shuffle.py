"""Tests that runs, order and shuffle give the in-memory bytes for any sizes, and name damage."""

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
    read_written,
    run,
    run_shuffle,
    split,
    texts_of,
    write_tokenized,
)

PLAN = plan_of(windows_per_shard=20)
STAGES = (sorted_runs.Runs, shuffle.OrderDocuments, shuffle.WriteShards)


def set_sizes(patch: pytest.MonkeyPatch, documents=13, read=200, copied=100, block=16) -> None:
    patch.setattr(sorted_runs, "RUNS", 3)
    patch.setattr(sorted_runs, "DOCUMENTS_PER_RANGE", documents)
    for name, size in (("READ_BYTES", read), ("COPY_BYTES", copied), ("BLOCK_BYTES", block)):
        patch.setattr(blocks, name, size)
    # hundreds of tiny files: fsync would take most of the time
    patch.setattr(os, "fsync", lambda file: None)


@pytest.fixture
def tiny(monkeypatch):
    set_sizes(monkeypatch)


def stages_of(out: Path, plan=PLAN) -> list[stage.Stage]:
    return [kind(plan, out, ("notes",)) for kind in STAGES]


def run_all(stages: list[stage.Stage]) -> None:
    for work in stages:
        run(work)


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
    dtype=st.sampled_from(["<u2", "<u4"]),
)
def test_bytes_are_those_of_the_in_memory_way_for_any_sizes(
    texts, units, seq_len, windows_per_shard, documents, read, copied, block, dtype
):
    # of more than 3 units, pairs are merged to runs; origins of documents are compared too
    texts += [f"{i}" for i in range(60)]  # enough for a window of each part
    plan = plan_of(("notes",), seq_len, windows_per_shard)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        set_sizes(patch, documents, read, copied, 2 * block)
        patch.setattr(shuffle_assets, "TOKEN", np.dtype(dtype))
        run_shuffle(Path(folder), plan, {"notes": texts}, units)
        assert read_written(Path(folder), "notes") == in_memory(texts, plan)


def test_too_little_text_is_named(tmp_path):
    write_tokenized(tmp_path, "notes", ((), ()))
    with pytest.raises(
        ValueError, match=r"source 'notes' is empty.*filter/notes/unit-\*/receipt\.json"
    ):
        shuffle.OrderDocuments(PLAN, tmp_path, ("notes",)).units()
    write_tokenized(tmp_path, "notes", split(["a"], 2))
    _, order, work = stages_of(tmp_path, plan_of(valid_per_10000=1))
    run(order)
    with pytest.raises(
        ValueError, match=r"'notes' has too little text for one training window of 8 tokens"
    ):
        work.units()


# a stage of STAGES reads what the one of the same place here made
READ_STAGES = ("tokenize", "runs", "order")
OF_DOCUMENTS = ("tokens.bin", "documents.npy", "origins.bin", "tokens.bin.xxh3")


@pytest.mark.parametrize(
    ("units", "damaged_stage", "files"),
    [
        (2, "tokenize", OF_DOCUMENTS),
        (4, "runs", OF_DOCUMENTS),
        (2, "order", ("train.npy", "valid.npy")),
    ],
)
def test_a_flipped_bit_before_a_shard_stops_it_and_mends_itself(
    tmp_path, tiny, units, damaged_stage, files
):
    plan = plan_of(valid_per_10000=3000)
    parts = split(texts_of(100), units)
    first = READ_STAGES.index(damaged_stage)
    for name in files:
        out = tmp_path / name
        write_tokenized(out, "notes", parts)
        stages = stages_of(out, plan)
        run_all(stages[:first])
        folder = out / damaged_stage / "notes/unit-00001"
        flip(folder / name)
        # damaged hashes are reported as damage of the file that they belong to
        broken = rf"{name.removesuffix('.xxh3')} is not what '{damaged_stage}' wrote"
        with pytest.raises(ValueError, match=broken) as error:
            run_all(stages[first:])
        assert "\n" not in str(error.value)
        assert str(folder) in str(error.value)
        # without its receipt the unit is made again
        assert not (folder / stage.RECEIPT).is_file()
        assert not list((out / "shuffle/notes").glob(".*"))
        write_tokenized(out, "notes", parts)
        run_all(stages)
        assert read_written(out, "notes") == in_memory(texts_of(100), plan)
