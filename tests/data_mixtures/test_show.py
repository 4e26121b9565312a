"""What `show` prints is what training reads: tokens, and documents across windows and shards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tyro
from rich.console import Console

from data_mixtures import mixture, shards, show, tokenizer
from data_mixtures.mixture import Mixture


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    """Run `show` as its command does; returns the objects that --json prints, or else the text."""

    def call(*arguments: Any) -> Any:
        capsys.readouterr()
        console = Console(width=80)
        show.run(tyro.cli(show.Question, args=[str(each) for each in arguments]), console)
        printed = capsys.readouterr().out
        return [json.loads(line) for line in printed.splitlines()] if "--json" in arguments else printed

    return call


@pytest.fixture
def lock(prepared_data: Path) -> Path:
    return prepared_data / "phase1.lock.json"


def documents_of(folder: Path) -> list[tuple[int, int, str]]:
    """(first token in the source, tokens, id) of all documents, with nothing but numpy and the
    index of each shard.
    """
    manifest, found, shard_begins = shards.read_manifest(folder), [], 0
    for entry in manifest["shards"]:
        ids, lengths, *_ = shards.read_documents(folder / entry["docs"]["name"])
        tokens = np.fromfile(folder / entry["name"], f"<u{manifest['token_bytes']}")
        begins = (
            np.flatnonzero(tokens[: entry["windows"] * manifest["seq_len"]] == manifest["bos_id"])
            + shard_begins
        )
        found += zip(begins.tolist(), lengths.tolist(), [f"{i:016x}" for i in ids], strict=True)
        shard_begins += entry["windows"] * manifest["seq_len"]
    return found


def test_every_document_of_a_window_is_named(run, lock: Path, prepared_data: Path) -> None:
    """Windows of all shards; documents longer than a window, that begin in another shard, at
    a window's first token.
    """
    opened, pieces = Mixture.open(lock), tokenizer.load(shards.tokenizer_path(prepared_data))
    stride = 64 * opened.seq_len
    of_sources = {name: documents_of(prepared_data / name) for name in ("web", "code")}
    shown = [
        each for step in range(1, 80) for each in run(lock, "--step", step, "--global-batch", 4, "--json")
    ]
    assert [each["sequence"] for each in shown] == list(range(79 * 4))
    kinds = set()
    for each in shown:
        assert each["tokens"] == opened.sequences(each["sequence"], 1)[0][0].tolist()
        first = int(each["shard"][6:11]) * stride + each["token_offset"]
        window = range(first, first + opened.seq_len + 1)
        wanted = [(max(begin, first) - first, begin, length, name) for begin, length, name in of_sources[each["source"]]
                  if begin < window.stop and begin + length > first]  # fmt: skip
        found = [(part["begins"], first + part["begins"] - part.get("before", 0), part["document_tokens"], part["id"])
                 for part in each["documents"]]  # fmt: skip
        assert found == wanted
        assert sum(part["tokens"] for part in each["documents"]) == opened.seq_len + 1
        for part in each["documents"]:
            ids = each["tokens"][part["begins"] : part["begins"] + part["tokens"]]
            assert part["text"] == pieces.decode(ids)
        begins_before = first - each["documents"][0].get("before", 0)
        kinds |= {"other shard"} if begins_before < first - each["token_offset"] else set()
        kinds |= {"first token"} if "before" not in each["documents"][0] else set()
        kinds |= {"many"} if len(each["documents"]) > 2 else set()
    assert kinds >= {"other shard"}, kinds


def test_text_says_where_a_sequence_and_its_documents_lie(run, lock: Path) -> None:
    (each,) = run(lock, "--sequence", 11, "--json")
    text = run(lock, "--sequence", 11)
    head = f"sequence 11: {each['source']}/{each['shard']}, token {each['token_offset']:,}, epoch 0\n"
    assert text.startswith(head)
    for part in each["documents"]:
        assert f"document {part['id']}, tokens {part.get('before', 0):,} to " in text
        assert part["text"] in text
    assert run(lock, "--step", 3, "--global-batch", 4, "--sequence", 3) == text
    late = run(lock, "--sequence", 3 * 10**3, "--json")[0]
    assert late["epoch"] >= 1


def test_documents_are_found_by_id(run, lock: Path, prepared_data: Path) -> None:
    begin, length, name = documents_of(prepared_data / "code")[7]
    (found,) = run(lock, "--document", name, "--json")
    assert (found["source"], found["document_tokens"]) == ("code", length)
    assert int(found["shard"][6:11]) * 64 * 32 + found["token_offset"] == begin
    assert name in run(lock, "--document", name)
    with pytest.raises(ValueError, match="no such document in the training data; held-out"):
        run(lock, "--document", "0" * 16)
    with pytest.raises(ValueError, match="must be 16 hexadecimal digits"):
        run(lock, "--document", "xyz")


def test_documents_are_found_by_where_they_came_from(run, lock: Path) -> None:
    (each,) = run(lock, "--sequence", 11, "--json")
    wanted = each["documents"][0]
    part = f'"row":{wanted["origin"]["row"]}'
    found = run(lock, "--origin", part, "--json")
    assert wanted["id"] in [other["id"] for other in found]
    assert 0 < len(found) < len(run(lock, "--origin", "row", "--json"))
    for other in found:
        assert str(other["origin"]["row"]).startswith(str(wanted["origin"]["row"]))
        assert run(lock, "--document", other["id"], "--json") == [other]
    assert f"row {wanted['origin']['row']}" in run(lock, "--sequence", 11)
    with pytest.raises(ValueError, match="no such document"):
        run(lock, "--origin", "https://nowhere")


def test_a_document_whose_shard_was_taken_out_has_no_name(run, prepared_data: Path, tmp_path: Path) -> None:
    """Quarantine leaves gaps: the shard before one is not the one that its first document began in."""
    shutil.copytree(prepared_data, tmp_path / "data")
    folder = tmp_path / "data/code"
    manifest = shards.read_manifest(folder)
    gone = manifest["shards"].pop(1)
    manifest["windows"] -= gone["windows"]
    shards.write_manifest(folder, manifest)
    lock = mixture.pin(tmp_path / "data", "phase1", {"web": 1, "code": 9}, 7, 32, 4)
    shown = run(lock, "--step", 1, "--global-batch", 200, "--json")
    behind = [each for each in shown if each["shard"] == "shard-00002.bin" and each["token_offset"] == 0]
    assert behind, "the first window behind the gap"
    crossing = [
        first for first, length, _ in documents_of(prepared_data / "code") if first < 4096 < first + length
    ]
    assert 2048 <= crossing[0] < 4096, "it began in the shard that is gone"
    assert "id" not in behind[0]["documents"][0]
    assert behind[0]["documents"][0]["text"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "give --step N"),
        (("--step", "0", "--global-batch", "4"), "give --step N"),
        (("--step", "1"), "needs --global-batch"),
        (("--step", "1", "--global-batch", "4", "--sequence", "4"), "a step has 4 sequences"),
    ],
)
def test_what_cannot_be_shown_is_said(run, lock: Path, more: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(lock, *more)


def test_a_folder_that_does_not_exist_is_named(run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere does not exist; give a lock file .* or a run folder"):
        run(tmp_path / "nowhere", "--step", "1")
