"""Runs, order and shuffle: the bytes of the in-memory way, whatever the units, runs, ranges and
pieces; opens that grow with the source and not its square; damage and what is missing by name.
"""

from __future__ import annotations

import os
import resource
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_mixtures import shards
from data_mixtures.stages import blocks, shuffle, sorted_runs, stage
from data_mixtures.stages.stage import Unit
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
    tokens_of,
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
        (1, ("tokenize", 1), "<u2"),
        (3, ("tokenize", 3), "<u2"),
        (4, ("runs", 2), "<u2"),
        (11, ("runs", 3), "<u2"),
        (2, ("tokenize", 2), "<u4"),
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


def test_equal_keys_are_ordered_by_id_and_equal_ids_are_duplicates():
    rows = [(5, 2, 9), (5, 1, 9), (5, 1, 3), (4, 8, 8), (5, 1, 9), (6, 0, 0), (6, 0, 0)]
    parts = []
    for unit in range(2):
        part = np.zeros(len(rows), sorted_runs.MERGED)
        for i, name in enumerate(("key", "high", "low")):
            part[name] = [row[i] for row in sorted(rows)]
        part["unit"] = unit
        parts.append(part)
    merged = sorted_runs.merge(parts)
    assert merged[["key", "high", "low"]].tolist() == sorted(set(rows))
    assert not merged["unit"].any()  # the first of the equal ones stays


def test_a_run_has_the_form_of_a_unit(tmp_path, tiny, monkeypatch):
    """All units in one run are the unit that one would be, duplicates and empty units included."""
    texts = texts_of(120)
    tokenized(tmp_path / "one", "notes", (tuple(texts),))
    tokenized(tmp_path / "many", "notes", ((), *split(texts, 4), ()))
    monkeypatch.setattr(sorted_runs, "RUNS", 1)
    run(sorted_runs.Runs(PLAN, tmp_path / "many", ("notes",)))
    one, counts = stage.result(tmp_path / "one", "tokenize", Unit("notes", 0))
    many, merged = stage.result(tmp_path / "many", "runs", Unit("notes", 0))
    assert merged["counts"] == {name: counts["counts"][name] for name in ("documents", "tokens", "bytes")}
    assert len(merged["files"]) == 6
    for name in merged["files"]:
        assert (many / name).read_bytes() == (one / name).read_bytes()


def test_more_units_than_files_may_be_open_make_more_runs(tmp_path, monkeypatch):
    for units, expected in ((20_000, -(-20_000 // 128)), (1_200, -(-1_200 // 19)), (64, 64)):
        monkeypatch.setattr(stage, "planned_units", lambda out, source, count=units: range(count))
        assert len(sorted_runs.made_by(tmp_path, "notes")[1]) == expected


def test_more_runs_than_a_process_may_open_at_first(tmp_path):
    """A source of 10 TB in units of 64 MiB has 1,250 runs, and each has two files open while
    a shard is written.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        with stage.exclusive(tmp_path):
            shuffled(tmp_path, plan_of(windows_per_shard=100), {"notes": texts_of(100)}, units=20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def count_opens(out: Path, units: int) -> Counter[str]:
    """How often files of each stage are opened from `runs` to `shuffle`, at five documents a unit."""
    texts = [f"{i} " + "x" * 60 for i in range(5 * units)]
    tokenized(out, "notes", split(texts, units))
    opens: Counter[str] = Counter()
    open_path = Path.open

    def counted(path, *more, **options):
        opens.update(name for name in ("tokenize", "runs", "order", "shuffle") if f"/{name}/" in str(path))
        return open_path(path, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", counted)
        run_all(stages_of(out, plan_of(seq_len=20, windows_per_shard=10)))
    return opens


def test_opens_grow_with_the_source(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(sorted_runs, "DOCUMENTS_PER_RANGE", 50)
    monkeypatch.setattr(sorted_runs, "RUNS", 4)
    once, twice = count_opens(tmp_path / "once", 20), count_opens(tmp_path / "twice", 40)
    assert set(once) == {"tokenize", "runs", "order", "shuffle"}
    # each file and its hashes, and its receipt for the key and the counts
    assert once["tokenize"] == 20 * (3 * 2 + 2)
    assert twice.total() < 2.2 * once.total()
    monkeypatch.setattr(sorted_runs, "RUNS", 1000)  # the planted error: without runs, with its square
    once, twice = count_opens(tmp_path / "without", 20), count_opens(tmp_path / "without twice", 40)
    assert twice.total() > 3 * once.total()


def test_a_small_held_out_part_is_read_alone(tmp_path, monkeypatch):
    """Held-out documents lie far apart: reading everything between them would read the whole source for them."""
    plan = plan_of(seq_len=4, valid_per_10000=300)
    texts = [f"{i} " + "x" * 500 for i in range(400)]
    read, read_blocks = [], blocks.CheckedFile.read_blocks

    def counted(file, first, last, into):
        read.append(last - first)
        read_blocks(file, first, last, into)

    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64)
    tokenized(tmp_path, "notes", split(texts, 2))
    _, order, work = stages_of(tmp_path, plan)
    run(order)
    monkeypatch.setattr(blocks.CheckedFile, "read_blocks", counted)
    stage.do(work, work.units()[-1])
    counts = stage.counts(tmp_path, "order", "notes", len(shuffle.ranges_of(tmp_path, "notes")))
    tokens = sum(each["valid"]["tokens"] for each in counts)
    assert tokens // 2 < sum(read) * 64 // 2 <= 2 * tokens < 400 * len(tokens_of(texts[0])) // 10


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


def test_units_are_freed_once_they_were_read_and_missed_by_name_when_they_are_needed_again(tmp_path, tiny):
    texts = texts_of(100)
    tokenized(tmp_path, "notes", split(texts, 4))
    done = runs, _, work = stages_of(tmp_path)
    run(runs)
    for number in range(4):
        assert stage.free(tmp_path, "tokenize", Unit("notes", number))
    assert is_all_done(runs)
    run_all(done[1:])
    for unit in runs.units():
        assert stage.free(tmp_path, "runs", unit)
    assert is_all_done(*done)
    assert shuffled_files(tmp_path, "notes") == in_memory(texts, PLAN)
    with pytest.raises(ValueError, match=r"runs/notes/unit-00000 was freed, and is needed again; remove"):
        stage.do(work, work.units()[0])


def test_too_little_text_is_named(tmp_path):
    tokenized(tmp_path, "notes", ((), ()))
    with pytest.raises(ValueError, match=r"source 'notes' is empty.*filter/notes/unit-\*/receipt\.json"):
        shuffle.OrderDocuments(PLAN, tmp_path, ("notes",)).units()
    tokenized(tmp_path, "notes", split(["a"], 2))
    _, order, work = stages_of(tmp_path, plan_of(valid_per_10000=1))
    run(order)
    with pytest.raises(ValueError, match=r"'notes' has too little text for one training window of 8 tokens"):
        work.units()


@pytest.mark.parametrize(("units", "made"), [(2, "tokenize"), (4, "tokenize"), (4, "runs")])
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


def test_damage_of_the_order_and_files_of_another_length_stop_what_reads_them(tmp_path, tiny):
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

    unit = Unit("notes", 0)
    folder, receipt = stage.result(tmp_path, "tokenize", unit)
    tokens = folder / "tokens.bin"
    whole = tokens.read_bytes()
    for damage in (whole[:-1], whole[:-20], whole + b"x", b""):
        tokens.write_bytes(damage)
        with (
            blocks.opened(tmp_path, "tokenize", [unit], tokens.name) as (file,),
            pytest.raises(ValueError, match=r"tokens\.bin is not what 'tokenize' wrote"),
        ):
            file.read(0, len(whole))
        shards.write_json(folder / stage.RECEIPT, receipt)
    documents = folder / "documents.npy"
    np.save(documents, np.load(documents)[::-1])
    blocks.seal(documents)
    with (
        blocks.opened(tmp_path, *sorted_runs.made_by(tmp_path, "notes"), documents.name) as files,
        pytest.raises(AssertionError, match=r"unit-00000/documents\.npy is not sorted"),
    ):
        sorted_runs.read_slices(files, 0, 2**64)
