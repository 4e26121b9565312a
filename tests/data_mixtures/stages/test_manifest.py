"""Tests of the manifest: published whole, reused if unchanged, every document counted."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
from rich.console import Console

from data_mixtures import tokenizer
from data_mixtures.stages import manifest
from tests.data_mixtures.conftest import files_of, flip
from tests.data_mixtures.stages.shuffle_assets import (
    SOURCES,
    TWO_SOURCES,
    TWO_TEXTS,
    digest,
    in_memory,
    plan_of,
    prepare_texts,
    read_json,
    select,
    split,
    tokens_of,
    write_counts,
)


def write(data):
    return manifest.write(TWO_SOURCES, data, SOURCES, Console(quiet=True))


def test_files_and_fields(data):
    for source in SOURCES:
        content = read_json(data / source / "source.json")
        expected = in_memory(TWO_TEXTS[source], TWO_SOURCES)
        assert {path.name for path in (data / source).iterdir()} == {*expected, "source.json"}
        for entry in (*content["shards"], content["valid"]):
            assert (data / source / entry["name"]).read_bytes() == expected[entry["name"]]
            assert entry["sha256"] == digest(expected[entry["name"]])
        texts = TWO_TEXTS[source]
        unique = set(TWO_TEXTS[source])
        assert content["documents"] == content["kept"] == len(unique)
        assert content["bytes"] == sum(len(text.encode()) for text in unique)
        assert content["tokens"] == content["bytes"] + 2 * len(unique)
        # beside real counts of documents, the made-up ones of write_counts: 1 of fetch, 2 a unit of
        # the filter
        made_up = {"contaminated": 2, "not_utf8": 1, "too_short": 2}
        assert content["dropped"] == {**made_up, "duplicate": len(texts) - len(unique)}
        text_of, train, _ = select(texts, TWO_SOURCES)
        sizes = [len(tokens_of(text_of[digest])) for digest in train]
        used = 8 * content["windows"] + 1
        unused = (np.cumsum([0, *sizes])[:-1] >= used - 1).sum()
        assert content["unused"]["train_tokens"] == sum(sizes) - used
        assert content["unused"]["train_documents"] == unused
        assert content["longest"] == max(len(tokens_of(text)) for text in unique)
        assert (
            content["read"] == len(texts) + 5 == content["kept"] + sum(content["dropped"].values())
        )
        assert content["contamination"] == {"quiz": {"documents": 2, "items": 3}}
        assert content["windows"] == sum(entry["windows"] for entry in content["shards"])
        facts = {
            "plan_hash": f"plan of {source}",
            "seq_len": 8,
            "seed": 7,
            "source": source,
            "format": 2,
        }
        assert {key: content[key] for key in facts} == facts


def test_files_are_links_and_nothing_changed_is_reused_by_whatever_code(data, monkeypatch):
    shard = data / "notes/shard-00000.bin"
    assert os.path.samefile(shard, data / "shuffle/notes/unit-00000/shard-00000.bin")
    changed_ns = {path: path.stat().st_mtime_ns for path in sorted((data / "notes").iterdir())}
    before = files_of(data / "notes")
    for version in (manifest._code_version(), "another"):
        monkeypatch.setattr(manifest, "_code_version", lambda version=version: version)
        assert write(data) == {"notes": "reused", "sums": "reused"}
        assert {
            path: path.stat().st_mtime_ns for path in sorted((data / "notes").iterdir())
        } == changed_ns
        assert files_of(data / "notes") == before


def test_a_file_that_changed_is_published_again_while_its_unit_is_there(data):
    path = data / "notes/shard-00001.bin"
    expected = path.read_bytes()
    path.unlink()
    assert write(data) == {"notes": "built", "sums": "reused"}
    assert path.read_bytes() == expected
    # the size is right, but not the time: it is not the file that shuffle wrote
    flip(path, 0)
    assert write(data)["notes"] == "built"
    assert path.read_bytes() == expected
    for shard in (data / "shuffle/notes").glob("unit-*/shard-*"):
        shard.unlink()
    assert write(data)["notes"] == "reused"
    path.unlink()
    missing = r"shard-\d+\.bin is missing, so .* is not published; run 'shuffle'"
    with pytest.raises(ValueError, match=missing):
        write(data)


def test_without_hard_links_files_are_copied(data, monkeypatch):
    def no_links(*args):
        # as between two file systems
        raise OSError(errno.EXDEV, "cross-device link")

    shard = data / "notes/shard-00000.bin"
    before = read_json(data / "notes/source.json")
    (data / "notes/source.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", no_links)
        assert write(data)["notes"] == "built"
    assert not os.path.samefile(shard, data / "shuffle/notes/unit-00000/shard-00000.bin")
    assert read_json(data / "notes/source.json") == before
    assert write(data)["notes"] == "reused"


def test_counts_that_do_not_add_up_are_refused(data):
    # as if filtered again, after the rest
    write_counts(data, "notes", split(TWO_TEXTS["notes"][1:], 2))
    with pytest.raises(ValueError, match=r"'notes' was filtered again after it was tokenized"):
        write(data)
    write_counts(data, "notes", split(TWO_TEXTS["notes"], 2), lie=1)
    with pytest.raises(ValueError, match=r"'notes': \d+ documents were read, \d+ are kept"):
        write(data)


def test_a_phase_is_pinned_when_all_its_sources_are_there(data, capsys):
    plan = plan_of((*SOURCES, "later"), windows_per_shard=20)
    (data / "phase1.lock.json").unlink()
    manifest.write(plan, data, SOURCES, Console(width=200))
    assert "phase1 is not pinned yet: later not prepared" in capsys.readouterr().out
    assert not (data / "phase1.lock.json").exists()


def test_smaller_data_replaces_larger_when_asked(data):
    fewer = {**TWO_TEXTS, "notes": TWO_TEXTS["notes"][:80]}
    # the lock still protects the data where its manifest is lost
    for damaged in (False, True):
        if damaged:
            (data / "notes/source.json").unlink()
        before = files_of(data / "notes")
        pinned = r"data/notes holds data that phase1.lock.json pins.* --replace does that"
        with pytest.raises(ValueError, match=pinned):
            prepare_texts(data, TWO_SOURCES, fewer)
        assert files_of(data / "notes") == before
    prepare_texts(data, TWO_SOURCES, fewer, replace=True)
    names = {path.name for path in (data / "notes").iterdir()}
    assert len(names) < len(before)
    assert names == {*in_memory(fewer["notes"], TWO_SOURCES), "source.json"}


def test_shards_of_another_width_than_the_tokenizers_are_refused(data, monkeypatch):
    facts = tokenizer.facts(data / "tokenizer.model")
    monkeypatch.setattr(tokenizer, "facts", lambda path: {**facts, "token_bytes": 4})
    other = r"shuffle/notes was made with another tokenizer; run 'tokenize' again"
    with pytest.raises(ValueError, match=other):
        write(data)
