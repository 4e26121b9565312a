"""Order and shuffle: the bytes of the in-memory way, whatever the units, ranges and
pieces; counts; clear errors.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from data_mixtures import shards
from data_mixtures.stages import blocks, shuffle, sorted_runs, stage
from data_mixtures.stages.stage import Unit
from tests.data_mixtures.stages.shuffle_assets import (
    Tokenize,
    digest,
    in_memory,
    plan_of,
    read_json,
    run,
    shuffled,
    shuffled_files,
    split,
    texts_of,
    tokenized,
    tokens_of,
    write_plan,
)


@pytest.fixture
def tiny(monkeypatch):
    """Ranges and pieces so small that a few texts need many of them."""

    monkeypatch.setattr(sorted_runs, "DOCUMENTS_PER_RANGE", 13)
    for module, name, size in (
        (blocks, "READ_BYTES", 200),
        (blocks, "COPY_BYTES", 100),
        (blocks, "BLOCK_BYTES", 16),
    ):
        monkeypatch.setattr(module, name, size)
    monkeypatch.setattr(os, "fsync", lambda file: None)  # hundreds of tiny files


@pytest.mark.parametrize("units", [1, 3, 7])
def test_bytes_are_those_of_the_in_memory_way_for_any_units(tmp_path, tiny, units):
    texts, plan = texts_of(200), plan_of(windows_per_shard=20)
    shuffled(tmp_path, plan, {"notes": texts}, units)
    files, expected = shuffled_files(tmp_path, "notes"), in_memory(texts, plan)
    assert sorted(files) == sorted(expected)
    assert len(files) > 20
    assert files == expected
    assert len(shuffle.ranges_of(tmp_path, "notes")) == -(-200 // 13)  # of the documents, not of the units
    orders = stage.receipts(tmp_path, "order", "notes", len(shuffle.ranges_of(tmp_path, "notes")))
    assert sum(receipt["counts"]["duplicate"] for receipt in orders) == 200 - len(set(texts))
    assert sum(receipt["counts"]["documents"] for receipt in orders) == 200


@settings(max_examples=15, deadline=None)
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
        patch.setattr(sorted_runs, "DOCUMENTS_PER_RANGE", documents)
        patch.setattr(blocks, "READ_BYTES", read)
        patch.setattr(blocks, "COPY_BYTES", copied)
        patch.setattr(blocks, "BLOCK_BYTES", 2 * block)
        patch.setattr(os, "fsync", lambda file: None)  # hundreds of tiny files
        shuffled(Path(folder), plan, {"notes": texts}, units)
        assert shuffled_files(Path(folder), "notes") == in_memory(texts, plan)


def test_the_comparison_sees_a_wrong_order(tmp_path, tiny, monkeypatch):
    # the planted error: a range that takes its units one after the other instead of merging them
    texts, plan = texts_of(200), plan_of()
    monkeypatch.setattr(
        sorted_runs, "merge", lambda parts: sorted_runs.first_of_equals(np.concatenate(parts))
    )
    shuffled(tmp_path, plan, {"notes": texts}, 3)
    assert shuffled_files(tmp_path, "notes") != in_memory(texts, plan)


def test_equal_keys_are_ordered_by_id_and_equal_ids_are_duplicates():
    rows = [(5, 2, 9), (5, 1, 9), (5, 1, 3), (4, 8, 8), (5, 1, 9), (6, 0, 0), (6, 0, 0)]
    parts = []
    for unit in range(2):
        part = np.zeros(len(rows), sorted_runs.MERGED)
        for i, name in enumerate(("key", "high", "low")):
            part[name] = sorted(row[i] for row in rows) if name == "key" else [row[i] for row in sorted(rows)]
        part["unit"] = unit
        parts.append(part)
    merged = sorted_runs.merge(parts)
    assert merged[["key", "high", "low"]].tolist() == sorted(set(rows))
    assert not merged["unit"].any()  # the first of the equal ones stays


def test_entries_of_the_manifest(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr(shards, "BLOCK_BYTES", 32)  # shards of 82 bytes have three blocks
    texts, plan = texts_of(120), plan_of()
    shuffled(tmp_path, plan, {"notes": texts})
    expected = in_memory(texts, plan)
    units = shuffle.WriteShards(plan, tmp_path, ("notes",)).units()
    for unit in units:
        folder, receipt = stage.result(tmp_path, "shuffle", unit)
        entry, data = receipt["counts"], expected[receipt["counts"]["name"]]
        assert entry["bytes"] == len(data) == 2 * entry["tokens"] == 2 * (entry["windows"] * 8 + 1)
        assert entry["sha256"] == digest(data)
        assert entry["xxh3_blocks"] == [
            xxhash.xxh3_64_hexdigest(data[i : i + 32]) for i in range(0, len(data), 32)
        ]
        if unit is not units[-1]:
            assert entry["docs"]["sha256_uncompressed"] == digest(expected[entry["docs"]["name"]])
            assert len(shards.read_documents(folder / entry["docs"]["name"])[0]) == entry["docs"]["documents"]
    held_out = {
        text for text in texts if xxhash.xxh3_128_intdigest(text.encode()) % 2**64 < 1500 * 2**64 // 10_000
    }
    assert entry["name"] == "valid.bin"
    assert entry["documents"] == len(held_out)


def test_a_small_held_out_part_is_read_alone(tmp_path, monkeypatch):
    """Held-out documents lie far apart: reading everything between them would read the whole source for them."""
    plan = plan_of(seq_len=4, valid_per_10000=300)
    texts = [f"{i} " + "x" * 500 for i in range(400)]
    read = []
    read_blocks = blocks.CheckedFile.read_blocks

    def counted(file, first, last, into):
        read.append(last - first)
        read_blocks(file, first, last, into)

    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64)
    tokenized(tmp_path, "notes", split(texts, 2))
    run(shuffle.OrderDocuments(plan, tmp_path, ("notes",)))
    work = shuffle.WriteShards(plan, tmp_path, ("notes",))
    monkeypatch.setattr(blocks.CheckedFile, "read_blocks", counted)
    stage.do(work, work.units()[-1])
    orders = stage.receipts(tmp_path, "order", "notes", len(shuffle.ranges_of(tmp_path, "notes")))
    counts = [receipt["counts"]["valid"] for receipt in orders]
    tokens = sum(count["tokens"] for count in counts)
    assert tokens // 2 < sum(read) * 64 // 2 <= 2 * tokens < 400 * len(tokens_of(texts[0])) // 10


def test_a_finished_unit_is_kept_and_a_change_before_it_is_seen(tmp_path, tiny):
    texts, plan = texts_of(100), plan_of()
    shuffled(tmp_path, plan, {"notes": texts})
    order, work = (
        shuffle.OrderDocuments(plan, tmp_path, ("notes",)),
        shuffle.WriteShards(plan, tmp_path, ("notes",)),
    )
    assert all(stage.is_done(order, unit) for unit in order.units())
    assert all(stage.is_done(work, unit) for unit in work.units())
    assert not any(
        stage.is_done(shuffle.WriteShards(plan_of(seq_len=9), tmp_path, ("notes",)), u) for u in work.units()
    )
    assert not any(
        stage.is_done(shuffle.OrderDocuments(plan_of(valid_per_10000=1501), tmp_path, ("notes",)), u)
        for u in order.units()
    )
    tokenized(tmp_path, "notes", split([*texts, "one more"], 2))
    assert not any(stage.is_done(order, unit) for unit in order.units())
    assert not any(stage.is_done(work, unit) for unit in work.units())


def test_fewer_documents_leave_the_units_of_more_aside(tmp_path, tiny):
    plan = plan_of()
    shuffled(tmp_path, plan, {"notes": texts_of(300)})
    many = len(list((tmp_path / "shuffle/notes").iterdir()))
    texts = texts_of(100, seed=1)
    shuffled(tmp_path, plan, {"notes": texts})
    units = shuffle.WriteShards(plan, tmp_path, ("notes",)).units()
    assert len(units) < many
    files = {}
    for unit in units:
        folder, receipt = stage.result(tmp_path, "shuffle", unit)
        files[receipt["counts"]["name"]] = (folder / receipt["counts"]["name"]).read_bytes()
    expected = {name: data for name, data in in_memory(texts, plan).items() if name.endswith(".bin")}
    assert files == expected


def test_units_without_documents_are_fine(tmp_path, tiny):
    texts, plan = texts_of(120), plan_of()
    tokenized(tmp_path, "notes", ((), *split(texts, 2), ()))
    run(shuffle.OrderDocuments(plan, tmp_path, ("notes",)))
    run(shuffle.WriteShards(plan, tmp_path, ("notes",)))
    assert shuffled_files(tmp_path, "notes") == in_memory(texts, plan)


def test_freed_units_are_not_needed_by_what_is_done(tmp_path, tiny):
    plan = plan_of()
    shuffled(tmp_path, plan, {"notes": texts_of(100)})
    stage.free(tmp_path, "tokenize", Unit("notes", 0))
    order, work = (
        shuffle.OrderDocuments(plan, tmp_path, ("notes",)),
        shuffle.WriteShards(plan, tmp_path, ("notes",)),
    )
    assert all(stage.is_done(order, unit) for unit in order.units())
    assert all(stage.is_done(work, unit) for unit in work.units())
    with pytest.raises(ValueError, match=r"tokenize/notes/unit-00000 was freed, and is needed again"):
        stage.do(work, work.units()[0])


def test_too_little_text_is_named(tmp_path):
    plan = plan_of()
    tokenized(tmp_path, "notes", ((), ()))
    with pytest.raises(ValueError, match=r"source 'notes' is empty.*filter/notes/unit-\*/receipt\.json"):
        shuffle.OrderDocuments(plan, tmp_path, ("notes",)).units()
    tokenized(tmp_path, "notes", split(["a"], 2))
    low = plan_of(valid_per_10000=1)
    run(shuffle.OrderDocuments(low, tmp_path, ("notes",)))
    with pytest.raises(ValueError, match=r"'notes' has too little text for one training window of 8 tokens"):
        shuffle.WriteShards(low, tmp_path, ("notes",)).units()


def test_missing_and_damaged_inputs_are_named(tmp_path, tiny):
    plan, order = plan_of(), shuffle.OrderDocuments(plan_of(), tmp_path, ("notes",))
    with pytest.raises(ValueError, match=r"plan\.json does not exist; run"):
        order.units()
    write_plan(tmp_path, "notes", 3)
    tokenize = Tokenize(tmp_path, "notes", split(texts_of(100), 3))
    for unit in (Unit("notes", 0), Unit("notes", 2)):
        stage.do(tokenize, unit)
    with pytest.raises(ValueError, match=r"notes/unit-00001 has not been through 'tokenize'"):
        order.units()
    run(tokenize)
    with pytest.raises(ValueError, match=r"notes/unit-00000 has not been through 'order'"):
        shuffle.WriteShards(plan, tmp_path, ("notes",)).units()
    stage.do(order, order.units()[0])
    with pytest.raises(ValueError, match=r"notes/unit-00001 has not been through 'order'"):
        shuffle.WriteShards(plan, tmp_path, ("notes",)).units()
    run(order)
    work = shuffle.WriteShards(plan, tmp_path, ("notes",))
    tokens = tmp_path / "tokenize/notes/unit-00002/tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:40])
    with pytest.raises(
        ValueError, match=r"unit-00002/tokens\.bin is not what 'tokenize' wrote: bytes \d+ to"
    ):
        run(work)
    assert not list((tmp_path / "shuffle/notes").glob(".*"))
    run(tokenize)
    documents = tmp_path / "tokenize/notes/unit-00001/documents.npy"
    np.save(documents, np.load(documents)[::-1])
    blocks.seal(documents)
    with (
        blocks.opened(tmp_path, *sorted_runs.made_by(tmp_path, "notes"), documents.name) as files,
        pytest.raises(AssertionError, match=r"unit-00001/documents\.npy is not sorted"),
    ):
        sorted_runs.read_slices(files, 0, 2**64)


def test_receipts_hold_the_counts(tmp_path):
    plan, texts = plan_of(), texts_of(80)
    shuffled(tmp_path, plan, {"notes": texts})
    counts = read_json(tmp_path / "order/notes/unit-00000/receipt.json")["counts"]
    kept = counts["train"]["documents"] + counts["valid"]["documents"]
    assert counts["documents"] == 80 == kept + counts["duplicate"]
    assert counts["train"]["bytes"] + counts["valid"]["bytes"] == sum(
        len(text.encode()) for text in set(texts)
    )
