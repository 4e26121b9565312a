"""Tests that `show` prints what training reads, across windows and shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tyro
from rich.console import Console

from data_mixtures import shards, show, tokenizer
from data_mixtures.mixture import Mixture

SEQ_LEN, WINDOWS_PER_SHARD = 32, 64  # of data_folder


@pytest.fixture
def run(capsys):
    """Make a function that runs `show` and returns its --json objects, or its text."""

    def call(*arguments: Any) -> Any:
        capsys.readouterr()
        show.run(
            tyro.cli(show.Question, args=[str(argument) for argument in arguments]),
            Console(width=80),
        )
        printed = capsys.readouterr().out
        return (
            [json.loads(line) for line in printed.splitlines()]
            if "--json" in arguments
            else printed
        )

    return call


@pytest.fixture
def lock(data_folder):
    return data_folder / "phase1.lock.json"


def first_token(window: dict) -> int:
    """Return where a sequence or document begins among the tokens of its source."""
    return int(window["shard"][6:11]) * WINDOWS_PER_SHARD * SEQ_LEN + window["token_offset"]


def documents_of(folder: Path) -> list[tuple[int, int, str]]:
    """Return (first token in the source, tokens, id) of all documents, by numpy alone."""
    manifest = shards.read_manifest(folder)
    documents = []
    shard_begin = 0
    for entry in manifest["shards"]:
        ids, lengths, *_ = shards.read_documents(folder / entry["docs"]["name"])
        size = entry["windows"] * SEQ_LEN
        tokens = np.fromfile(folder / entry["name"], f"<u{manifest['token_bytes']}")[:size]
        begins = shard_begin + np.flatnonzero(tokens == manifest["bos_id"])
        documents += zip(begins.tolist(), lengths.tolist(), [f"{i:016x}" for i in ids], strict=True)
        shard_begin += size
    return documents


def test_every_document_of_a_window_is_named(run, lock, data_folder):
    # also documents longer than a window, from another shard, or at a window's first token
    opened = Mixture.open(lock)
    pieces = tokenizer.load(shards.tokenizer_path(data_folder))
    # the reference: documents and their places, read without `show`
    of_sources = {name: documents_of(data_folder / name) for name in ("web", "code")}
    windows = [
        window
        for step in (1, 2, 3)
        for window in run(lock, "--step", step, "--global-batch", 104, "--json")
    ]
    assert [window["sequence"] for window in windows] == list(range(312))
    from_other_shards = 0
    for window in windows:
        tokens = window["tokens"]
        parts = window["documents"]
        first = first_token(window)
        assert tokens == opened.sequences(window["sequence"], 1)[0][0].tolist()
        # the last token is only predicted
        end = first + SEQ_LEN
        expected = [
            (max(begin, first) - first, begin, length, name)
            for begin, length, name in of_sources[window["source"]]
            if begin < end and begin + length > first
        ]
        # where a document begins in its source: it may be in an earlier window
        begins = [first + part["begins"] - part.get("before", 0) for part in parts]
        assert [
            (part["begins"], begin, part["document_tokens"], part["id"])
            for part, begin in zip(parts, begins, strict=True)
        ] == expected
        assert sum(part["tokens"] for part in parts) == SEQ_LEN + 1
        for part in parts:
            assert part["text"] == pieces.decode(
                tokens[part["begins"] : part["begins"] + part["tokens"]]
            )
        from_other_shards += begins[0] < first - window["token_offset"]
    assert from_other_shards


def test_text_says_where_a_sequence_and_its_documents_lie(run, lock):
    (window,) = run(lock, "--sequence", 11, "--json")
    text = run(lock, "--sequence", 11)
    place = f"{window['source']}/{window['shard']}, token {window['token_offset']:,}"
    assert text.startswith(f"sequence 11: {place}, epoch 0\n")
    for part in window["documents"]:
        assert f"document {part['id']}, tokens {part.get('before', 0):,} to " in text
        assert part["text"] in text
    assert run(lock, "--step", 3, "--global-batch", 4, "--sequence", 3) == text
    # far beyond the first epoch of these small sources
    assert run(lock, "--sequence", 3 * 10**3, "--json")[0]["epoch"] >= 1


def test_documents_are_found_by_id_and_by_where_they_came_from(run, lock, data_folder):
    begin, length, name = documents_of(data_folder / "code")[7]
    (document,) = run(lock, "--document", name, "--json")
    assert (document["source"], document["document_tokens"]) == ("code", length)
    assert first_token(document) == begin
    assert name in run(lock, "--document", name)
    (window,) = run(lock, "--sequence", 11, "--json")
    expected = window["documents"][0]
    row = str(expected["origin"]["row"])
    of_row = run(lock, "--origin", f'"row":{row}', "--json")
    assert expected["id"] in [result["id"] for result in of_row]
    assert 0 < len(of_row) < len(run(lock, "--origin", "row", "--json"))
    for result in of_row:
        assert str(result["origin"]["row"]).startswith(row)
        assert run(lock, "--document", result["id"], "--json") == [result]
    assert f"row {row}" in run(lock, "--sequence", 11)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("", "give --step N"),
        ("--step 0 --global-batch 4", "give --step N"),
        ("--step 1", "needs --global-batch"),
        ("--step 1 --global-batch 4 --sequence 4", "a step has 4 sequences"),
        ("--document 0000000000000000", "no such document in the training data; held-out"),
        ("--document xyz", "must be 16 hexadecimal digits"),
        ("--origin https://nowhere", "no such document"),
    ],
)
def test_what_cannot_be_shown_is_said(run, lock, more, message):
    with pytest.raises(ValueError, match=message):
        run(lock, *more.split())
