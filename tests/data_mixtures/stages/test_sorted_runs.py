"""Sorted runs: the same shards with and without, opens that grow with the source and not
its square, damage named.
"""

from __future__ import annotations

import os
import resource
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data_mixtures import shards
from data_mixtures.stages import blocks, shuffle, sorted_runs, stage
from data_mixtures.stages.stage import Unit
from tests.data_mixtures.stages import shuffle_assets
from tests.data_mixtures.stages.shuffle_assets import (
    in_memory,
    origin_of,
    plan_of,
    run,
    shuffled,
    shuffled_files,
    split,
    texts_of,
    tokenized,
    unique_train,
)


@pytest.fixture
def few(monkeypatch):
    """At most three runs, and pieces so small that a few texts need many of them."""
    sizes = ((sorted_runs, "RUNS", 3), (sorted_runs, "DOCUMENTS_PER_RANGE", 13), (blocks, "READ_BYTES", 200))
    for module, name, size in (*sizes, (blocks, "COPY_BYTES", 100), (blocks, "BLOCK_BYTES", 16)):
        monkeypatch.setattr(module, name, size)
    monkeypatch.setattr(os, "fsync", lambda file: None)  # hundreds of tiny files


@pytest.mark.parametrize(("units", "made"), [(3, ("tokenize", 3)), (4, ("runs", 2)), (11, ("runs", 3))])
def test_bytes_are_the_same_with_and_without_runs(tmp_path, few, units, made):
    texts, plan = texts_of(200), plan_of(windows_per_shard=20)
    shuffled(tmp_path, plan, {"notes": texts}, units)
    name, made_of = sorted_runs.made_by(tmp_path, "notes")
    assert (name, len(made_of)) == made
    assert shuffled_files(tmp_path, "notes") == in_memory(texts, plan)
    orders = stage.receipts(tmp_path, "order", "notes", len(sorted_runs.ranges_of(tmp_path, "notes")))
    assert sum(receipt["counts"]["duplicate"] for receipt in orders) == 200 - len(set(texts))
    assert sum(receipt["counts"]["documents"] for receipt in orders) == 200


@pytest.mark.parametrize("units", [2, 5])
def test_tokens_of_four_bytes(tmp_path, few, units, monkeypatch):
    monkeypatch.setattr(shuffle_assets, "TOKEN", np.dtype("<u4"))
    texts, plan = texts_of(100), plan_of(windows_per_shard=20)
    shuffled(tmp_path, plan, {"notes": texts}, units)
    assert shuffled_files(tmp_path, "notes") == in_memory(texts, plan)


def test_a_run_has_the_form_of_a_unit(tmp_path, few):
    """All units in one run are the unit that one would be, duplicates and empty units included."""
    texts = texts_of(120)
    tokenized(tmp_path / "one", "notes", (tuple(texts),))
    tokenized(tmp_path / "many", "notes", ((), *split(texts, 4), ()))
    sorted_runs.RUNS = 1
    run(sorted_runs.Runs(plan_of(), tmp_path / "many", ("notes",)))
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


def test_each_document_keeps_its_origin(tmp_path, few):
    texts, plan = texts_of(200), plan_of(windows_per_shard=20)
    shuffled(tmp_path, plan, {"notes": texts}, 7)
    origins = []
    for path in sorted((tmp_path / "shuffle/notes").glob("unit-*/*.docs.zst")):
        origins += shards.read_documents(path)[2].to_pylist()
    expected = [origin_of(text) for text in unique_train(texts, plan)]
    assert 150 > len(origins) > 100
    assert origins == expected[: len(origins)]
    assert "" in origins  # a document without one


def opens(out: Path, units: int) -> Counter[str]:
    """How often files of each stage are opened from `runs` to `shuffle`, at five documents a unit."""
    texts, plan = [f"{i} " + "x" * 60 for i in range(5 * units)], plan_of(seq_len=20, windows_per_shard=10)
    tokenized(out, "notes", split(texts, units))
    found: Counter[str] = Counter()
    open_path = Path.open

    def counted(path, *more, **options):
        found.update(stage for stage in ("tokenize", "runs", "order", "shuffle") if f"/{stage}/" in str(path))
        return open_path(path, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", counted)
        for kind in (sorted_runs.Runs, shuffle.OrderDocuments, shuffle.WriteShards):
            run(kind(plan, out, ("notes",)))
    return found


@pytest.fixture
def few_ranges(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(sorted_runs, "DOCUMENTS_PER_RANGE", 50)
    monkeypatch.setattr(sorted_runs, "RUNS", 4)


def test_opens_grow_with_the_source(tmp_path, few_ranges):
    once, twice = opens(tmp_path / "once", 20), opens(tmp_path / "twice", 40)
    assert set(once) == {"tokenize", "runs", "order", "shuffle"}
    assert once["tokenize"] == 20 * (
        3 * 2 + 2
    )  # each file and its hashes, and its receipt for the key and the counts
    assert sum(twice.values()) < 2.2 * sum(once.values())


@pytest.mark.job
def test_without_runs_opens_grow_with_the_square(tmp_path, few_ranges, monkeypatch):
    monkeypatch.setattr(sorted_runs, "RUNS", 1000)
    once, twice = opens(tmp_path / "once", 20), opens(tmp_path / "twice", 40)
    assert sum(twice.values()) > 3 * sum(once.values())


def run_all(stages: list[stage.Stage]) -> None:
    for each in stages:
        run(each)


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["tokens.bin", "documents.npy", "origins.bin", "tokens.bin.xxh3"])
@pytest.mark.parametrize(("units", "made"), [(2, "tokenize"), (4, "tokenize"), (4, "runs")])
def test_a_flipped_bit_before_a_shard_stops_it(tmp_path, few, name, units, made):
    plan, texts = plan_of(valid_per_10000=3000), texts_of(100)
    tokenized(tmp_path, "notes", split(texts, units))
    done = [
        kind(plan, tmp_path, ("notes",))
        for kind in (sorted_runs.Runs, shuffle.OrderDocuments, shuffle.WriteShards)
    ]
    if made == "runs":
        run(done[0])
    folder = tmp_path / made / "notes/unit-00001"
    whole = (folder / name).read_bytes()
    flip(folder / name, len(whole) // 2)
    left = done[made == "runs" :]
    with pytest.raises(
        ValueError, match=rf"{name.removesuffix('.xxh3')} is not what '{made}' wrote"
    ) as error:
        run_all(left)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)
    assert not (folder / stage.RECEIPT).is_file()  # so it is made again
    tokenized(tmp_path, "notes", split(texts, units))
    run_all(done)
    assert shuffled_files(tmp_path, "notes") == in_memory(texts, plan)


@pytest.mark.parametrize("part", ["train", "valid"])
def test_a_flipped_bit_in_the_order_stops_the_shard(tmp_path, few, part):
    plan, texts = plan_of(), texts_of(100)
    shuffled(tmp_path, plan, {"notes": texts})
    flip(tmp_path / f"order/notes/unit-00002/{part}.npy", -3)
    with pytest.raises(ValueError, match=rf"order/notes/unit-00002/{part}\.npy is not what 'order' wrote"):
        run(shuffle.WriteShards(plan, tmp_path, ("notes",)))


def test_a_file_of_another_length_is_damaged(tmp_path, few):
    tokenized(tmp_path, "notes", split(texts_of(100), 2))
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


def test_tokenized_units_can_be_freed_after_the_runs_and_runs_after_the_shards(tmp_path, few):
    plan, texts = plan_of(), texts_of(100)
    tokenized(tmp_path, "notes", split(texts, 4))
    work = sorted_runs.Runs(plan, tmp_path, ("notes",))
    run(work)
    for number in range(4):
        assert stage.free(tmp_path, "tokenize", Unit("notes", number))
    assert all(stage.is_done(work, unit) for unit in work.units())
    order, write = (
        kind(plan, tmp_path, ("notes",)) for kind in (shuffle.OrderDocuments, shuffle.WriteShards)
    )
    run(order)
    run(write)
    for unit in work.units():
        assert stage.free(tmp_path, "runs", unit)
    assert all(stage.is_done(each, unit) for each in (work, order, write) for unit in each.units())
    assert shuffled_files(tmp_path, "notes") == in_memory(texts, plan)
    with pytest.raises(ValueError, match=r"runs/notes/unit-00000 was freed, and is needed again; remove"):
        stage.do(write, write.units()[0])


def test_a_changed_unit_changes_its_run_only(tmp_path, few):
    plan, texts = plan_of(), texts_of(100)
    parts = split(texts, 4)
    tokenized(tmp_path, "notes", parts)
    work = sorted_runs.Runs(plan, tmp_path, ("notes",))
    run(work)
    tokenized(tmp_path, "notes", (*parts[:3], (*parts[3], "one more")))
    assert [unit.number for unit in work.units() if not stage.is_done(work, unit)] == [1]
    run(work)
    assert np.load(tmp_path / "runs/notes/unit-00001/documents.npy").size == len(parts[2]) + len(parts[3]) + 1
