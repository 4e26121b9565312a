"""Tests that best-fit packed shards equal a plain reference for any units and runs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from rich.console import Console

from data_mixtures import mixture, packing, shards, show
from data_mixtures.stages import sorted_runs, verify
from tests.data_mixtures.stages.shuffle_assets import (
    SEED,
    TOKEN,
    plan_of,
    prepare_texts,
    read_written,
    run_shuffle,
    select,
    text_of,
    texts_of,
    tokens_of,
)

TEXTS = [*texts_of(300), *(f"{n} " + "long " * 40 * n for n in range(1, 5)), "a" * 700]
PLAN = dataclasses.replace(plan_of(seq_len=48, windows_per_shard=20), packing="best_fit")


def reference(texts: list[str]) -> dict[str, packing.Packed]:
    unique, train, valid = select(texts, PLAN)
    files = {}
    at = 0
    parts = dict[str, list[int]]()
    for digest in train:
        parts.setdefault(f"shard-{at // (48 * 20):05d}.bin", []).append(digest)
        at += len(tokens_of(unique[digest]))
    for file, digests in {**parts, shards.VALID: valid}.items():
        documents = [np.array(tokens_of(unique[digest]), TOKEN) for digest in digests]
        keys = np.array([digest % 2**64 for digest in digests], np.uint64)
        lengths = np.array(list(map(len, documents)))
        files[file] = packing.best_fit(np.concatenate(documents), lengths, keys, 48, SEED)
    return files


# every shard of the second ends where a document does
@pytest.mark.parametrize(
    "texts", [TEXTS, [f"{n:046}" for n in range(100)]], ids=["any", "as long as a window"]
)
def test_shards_are_those_of_the_reference(tmp_path, monkeypatch, texts):
    monkeypatch.setattr(sorted_runs, "RUNS", 2)
    monkeypatch.setattr(sorted_runs, "DOCUMENTS_PER_RANGE", 100)
    run_shuffle(tmp_path, PLAN, {"notes": texts}, units=6)
    files = read_written(tmp_path, "notes")
    expected = reference(texts)
    assert len(expected) > 4
    for name, packed in expected.items():
        assert files.pop(name) == packed.tokens.tobytes()
        assert files.pop(name.replace(".bin", ".flags.bin")) == packed.flags.tobytes()
    assert {name.split(".", 1)[1] for name in files} == {"docs.zst"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_texts(tmp_path_factory.mktemp("packed"), PLAN, {"notes": TEXTS})


def test_damage_of_flags_and_missing_documents_are_found(data, tmp_path):
    console = Console(quiet=True)
    assert not verify.verify(data, ("notes",), console, 1)
    path = data / "notes/shard-00001.flags.bin"
    before = path.read_bytes()
    # the bit of one token's BEGINS: the tokens themselves are whole
    path.write_bytes(before[:40] + bytes([before[40] ^ 2]) + before[41:])
    try:
        damage = verify.verify(data, ("notes",), console, 1)
        assert {item.path for item in damage} == {path}
        assert "shuffle/notes/unit-00001" in verify.remedy(tmp_path / "r.toml", data, damage)[0]
    finally:
        path.write_bytes(before)


def test_show_names_the_documents_of_a_window(data, monkeypatch):
    class Decoder:
        def decode(self, ids):
            return text_of([int(i) for i in ids if i])

    monkeypatch.setattr(show.tokenizer, "load", lambda path: Decoder())
    window = next(show.read_sequences(data / "phase1.lock.json", {}, np.array([3])))
    whole = [
        part for part in window["documents"] if part.get("document_tokens", 99) == part["tokens"]
    ]
    assert whole
    assert all(part["text"] in TEXTS for part in whole)
    lock = data / "phase1.lock.json"
    (place,) = show.find_documents(lock, whole[0]["id"], None, Console(quiet=True))
    offset = window["token_offset"] + whole[0]["begins"]
    assert (place["shard"], place["token_offset"]) == (window["shard"], offset)


def test_what_is_packed_otherwise_is_not_mixed(data, tmp_path):
    with pytest.raises(ValueError, match="was packed otherwise than 'concat'"):
        mixture.pin(data, "phase9", {"notes": 1}, SEED, 48, 1)
    with pytest.raises(ValueError, match="unknown packing 'best-fit'; did you mean 'best_fit'"):
        dataclasses.replace(PLAN, packing="best-fit")
