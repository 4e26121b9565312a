"""The manifest: published whole, by links, reused when nothing changed, with every document accounted for."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
from rich.console import Console

from data_mixtures import shards, tokenizer
from data_mixtures.mixture import Mixture, valid_windows
from data_mixtures.stages import manifest, stage
from data_mixtures.stages.stage import Unit
from tests.data_mixtures.stages.shuffle_assets import (
    Filter,
    digest,
    in_memory,
    plan_of,
    prepared,
    read_json,
    run,
    select,
    split,
    texts_of,
    tokens_of,
)

SOURCES = ("notes", "sums")
TEXTS = {"notes": texts_of(100), "sums": texts_of(60, seed=1)}


@pytest.fixture
def data(tmp_path):
    return prepared(tmp_path / "data", plan_of(SOURCES, windows_per_shard=50), TEXTS)


def write(data, plan=None):
    return manifest.write(plan or plan_of(SOURCES, windows_per_shard=50), data, SOURCES, Console(quiet=True))


def test_files_and_fields(data):
    plan = plan_of(SOURCES, windows_per_shard=50)
    for source in SOURCES:
        content, expected = read_json(data / source / "source.json"), in_memory(TEXTS[source], plan)
        assert {path.name for path in (data / source).iterdir()} == {*expected, "source.json"}
        for entry in (*content["shards"], content["valid"]):
            assert (data / source / entry["name"]).read_bytes() == expected[entry["name"]]
            assert entry["sha256"] == digest(expected[entry["name"]])
        unique = set(TEXTS[source])
        assert content["documents"] == content["kept"] == len(unique)
        assert content["bytes"] == sum(len(text.encode()) for text in unique)
        assert content["tokens"] == content["bytes"] + 2 * len(unique)
        # beside real counts of documents, the made-up ones of Fetch (1) and of Filter (2 a unit, of 2 units)
        dropped = {
            "contaminated": 2,
            "duplicate": len(TEXTS[source]) - len(unique),
            "not_utf8": 1,
            "too_short": 2,
        }
        assert content["dropped"] == dropped
        unique_texts, train, _ = select(TEXTS[source], plan)
        sizes = [len(tokens_of(unique_texts[digest])) for digest in train]
        used = 8 * content["windows"] + 1
        behind = [
            size for begin, size in zip(np.cumsum([0, *sizes]), sizes, strict=False) if begin >= used - 1
        ]
        assert content["unused"]["train_tokens"] == sum(sizes) - used
        assert content["unused"]["train_documents"] == len(behind)
        assert content["longest"] == max(len(tokens_of(text)) for text in unique)
        assert content["read"] == len(TEXTS[source]) + 5 == content["kept"] + sum(dropped.values())
        assert content["contamination"] == {"quiz": {"documents": 2, "items": 3}}
        assert content["plan_hash"] == f"plan of {source}"
        assert content["windows"] == sum(entry["windows"] for entry in content["shards"])
        assert (content["seq_len"], content["seed"], content["source"], content["format"]) == (
            8,
            7,
            source,
            2,
        )
    tokens, _ = Mixture.open(data / "phase1.lock.json").sequences(0, 20)
    assert tokens.shape == (20, 9)
    assert valid_windows(data, "notes").shape[1] == 9


def test_files_are_links_and_nothing_changed_is_reused(data):
    shard = data / "notes/shard-00000.bin"
    assert os.path.samefile(shard, data / "shuffle/notes/unit-00000/shard-00000.bin")
    before = {path: path.stat() for path in sorted((data / "notes").iterdir())}
    assert write(data) == {"notes": "reused", "sums": "reused"}
    assert {path: path.stat() for path in sorted((data / "notes").iterdir())} == before


def test_a_file_that_changed_is_published_again(data):
    expected = (data / "notes/shard-00001.bin").read_bytes()
    (data / "notes/shard-00001.bin").unlink()
    assert write(data) == {"notes": "built", "sums": "reused"}
    assert (data / "notes/shard-00001.bin").read_bytes() == expected
    flipped = bytearray(expected)
    flipped[0] ^= 1
    (data / "notes/shard-00001.bin").unlink()
    (data / "notes/shard-00001.bin").write_bytes(
        flipped
    )  # of the right size, but not the file that shuffle wrote
    assert write(data)["notes"] == "built"
    assert (data / "notes/shard-00001.bin").read_bytes() == expected


def test_without_hard_links_files_are_copied(data, monkeypatch):
    def no_links(*args):
        raise OSError(errno.EXDEV, "cross-device link")

    before = read_json(data / "notes/source.json")
    (data / "notes/source.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", no_links)
        assert write(data)["notes"] == "built"
    assert not os.path.samefile(
        data / "notes/shard-00000.bin", data / "shuffle/notes/unit-00000/shard-00000.bin"
    )
    assert read_json(data / "notes/source.json") == before
    assert write(data)["notes"] == "reused"


def test_a_failure_leaves_the_old_data_and_no_debris(data, monkeypatch):
    before = {path: path.read_bytes() for path in data.rglob("*") if path.is_file()}
    (data / "notes/source.json").unlink()

    def full_disk(*args):
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_json", full_disk)
        with pytest.raises(OSError, match="no space"):
            write(data)
    del before[data / "notes/source.json"]
    assert {path: path.read_bytes() for path in data.rglob("*") if path.is_file()} == before


def test_counts_that_do_not_add_up_are_refused(data):
    run(Filter(data, "notes", split(TEXTS["notes"][1:], 2)))  # as if filtered again, after the rest
    with pytest.raises(ValueError, match=r"'notes' was filtered again after it was tokenized"):
        write(data)
    run(Filter(data, "notes", split(TEXTS["notes"], 2), lie=1))
    with pytest.raises(ValueError, match=r"'notes': \d+ documents were read, \d+ are kept"):
        write(data)


def test_what_is_missing_is_named(data):
    (data / "plan.json").unlink()
    with pytest.raises(ValueError, match=r"plan\.json does not exist; run `python -m data_mixtures plan"):
        write(data)


def test_a_phase_is_pinned_when_all_its_sources_are_there(data, capsys):
    plan = plan_of((*SOURCES, "later"), windows_per_shard=50)
    (data / "phase1.lock.json").unlink()
    manifest.write(plan, data, SOURCES, Console(width=200))
    assert "phase1 is not pinned yet: later not prepared" in capsys.readouterr().out
    assert not (data / "phase1.lock.json").exists()


def test_duplicates_of_other_units_are_counted_once(tmp_path):
    data = prepared(
        tmp_path / "data",
        plan_of(SOURCES, windows_per_shard=50),
        {**TEXTS, "notes": TEXTS["notes"] * 3},
        units=3,
    )
    one, three = (
        read_json(folder / "notes/source.json")
        for folder in (prepared(tmp_path / "one", plan_of(SOURCES, windows_per_shard=50), TEXTS), data)
    )
    assert three["dropped"]["duplicate"] == one["dropped"]["duplicate"] + 200
    assert three["shards"] == one["shards"]
    assert np.array_equal(valid_windows(data, "notes"), valid_windows(tmp_path / "one", "notes"))


def test_freed_units_do_not_force_anything_anew(data):
    for path in (data / "shuffle/notes").glob("unit-*/shard-*"):
        path.unlink()
    assert write(data)["notes"] == "reused"
    (data / "notes/shard-00001.bin").unlink()
    with pytest.raises(ValueError, match=r"shard-\d+\.bin is missing, so .* is not published; run 'shuffle'"):
        write(data)


def test_smaller_data_replaces_larger(data):
    plan = plan_of(SOURCES, windows_per_shard=50)
    fewer = {**TEXTS, "notes": TEXTS["notes"][:80]}
    before = len(list((data / "notes").iterdir()))
    published = {path: path.read_bytes() for path in (data / "notes").iterdir()}
    for damaged in (
        False,
        True,
    ):  # other data does not replace what a lock pins, not even where the manifest is lost
        with pytest.raises(
            ValueError, match=r"data/notes holds data that phase1.lock.json pins.* --replace does that"
        ):
            prepared(data, plan, fewer)
        assert {path: path.read_bytes() for path in (data / "notes").iterdir()} == published
        if not damaged:
            (data / "notes/source.json").unlink()
            del published[data / "notes/source.json"]
    prepared(data, plan, fewer, replace=True)
    assert len(list((data / "notes").iterdir())) < before
    assert {path.name for path in (data / "notes").iterdir()} == {
        *in_memory(fewer["notes"], plan),
        "source.json",
    }


def test_a_changed_code_version_stays_that_of_the_code_that_made_the_shards(data, monkeypatch):
    before = (data / "notes/source.json").read_bytes()
    monkeypatch.setattr(manifest, "_code_version", lambda: "another")
    assert write(data) == {"notes": "reused", "sums": "reused"}
    assert (data / "notes/source.json").read_bytes() == before


def test_other_counts_of_the_same_data_are_written_without_publishing_it_again(data):
    before, lock = read_json(data / "notes/source.json"), (data / "phase1.lock.json").read_bytes()
    folder = (data / "notes").stat().st_ino
    for number in range(2):
        stage.do(Filter(data, "notes", split(TEXTS["notes"], 2), too_short=3), Unit("notes", number))
    assert write(data)["notes"] == "reused"
    after = read_json(data / "notes/source.json")
    assert after["dropped"] == {**before["dropped"], "too_short": 6}
    assert (data / "notes").stat().st_ino == folder
    assert after["content_sha256"] == before["content_sha256"]
    assert (data / "phase1.lock.json").read_bytes() == lock


@pytest.mark.parametrize(("name", "value"), [("seq_len", 9), ("windows", 1), ("tokenizer_sha256", "ab")])
def test_a_manifest_that_was_edited_is_refused_and_made_again(data, name, value):
    content, path = read_json(data / "notes/source.json"), data / "notes/source.json"
    before = path.read_bytes()
    (content if name != "windows" else content["shards"][1])[name] = value
    shards.write_json(path, content)
    with pytest.raises(ValueError, match=r"notes/source\.json says content_sha256 .* damaged or edited"):
        Mixture.open(data / "phase1.lock.json")
    assert write(data)["notes"] == "built"
    assert path.read_bytes() == before


def test_shards_of_another_width_than_the_tokenizers_are_refused(data, monkeypatch):
    facts = tokenizer.facts(data / "tokenizer.model")
    monkeypatch.setattr(tokenizer, "facts", lambda path: {**facts, "token_bytes": 4})
    with pytest.raises(
        ValueError, match=r"shuffle/notes was made with another tokenizer; run 'tokenize' again"
    ):
        write(data)
