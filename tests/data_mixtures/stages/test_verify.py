"""Tests that verify names damage by file and block, and that its commands restore the bytes."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from data_mixtures import shards
from data_mixtures.mixture import Mixture
from data_mixtures.stages import verify
from tests.data_mixtures.conftest import flip
from tests.data_mixtures.stages.shuffle_assets import SOURCES


def report(data: Path, printed: io.StringIO | None = None) -> list[verify.Damage]:
    return verify.verify(
        data, SOURCES, Console(file=printed or io.StringIO(), width=200), workers=3
    )


def damage_of(data: Path) -> list[str]:
    return [str(damage).replace(f"{data}/", "") for damage in report(data)]


def test_whole_data_is_whole(data):
    printed = io.StringIO()
    assert not report(data, printed)
    paths = [path for source in SOURCES for path in (data / source).iterdir()]
    files = [path for path in paths if path.name != shards.MANIFEST]
    size = sum(path.stat().st_size for path in files if path.suffix == ".bin")
    assert len(files) > 15
    assert f"{len(files)} files, {size:,} bytes: 0 damaged" in printed.getvalue()


def write_documents(path: Path, ids: np.ndarray, lengths: np.ndarray) -> dict:
    return shards.write_documents(path, (ids, lengths, np.zeros(len(ids))), ())


def other_docs(path: Path) -> None:
    ids, lengths, _ = shards.read_documents(path)
    write_documents(path, ids + np.uint64(1), lengths)


@pytest.mark.parametrize(
    ("file", "damage", "lines"),
    [
        (
            "notes/shard-00001.bin",
            lambda path: path.write_bytes(path.read_bytes()[:200]),
            ["block 1 does not", "block 2 cannot be read", "200 bytes, 322 in the manifest"],
        ),
        (
            "notes/shard-00001.bin",
            lambda path: path.write_bytes(path.read_bytes() + b"x" * 80),
            ["block 2 does not", "402 bytes"],
        ),
        ("sums/shard-00000.bin", Path.unlink, ["missing; 322 bytes"]),
        ("sums/shard-00002.docs.zst", Path.unlink, ["missing"]),
        ("sums/shard-00002.docs.zst", lambda path: flip(path, 1), ["cannot be unpacked"]),
        ("notes/shard-00002.docs.zst", other_docs, ["unpacked sha256"]),
        ("sums/shard-00099.bin", lambda path: path.write_bytes(b"x"), ["not in the manifest"]),
        ("tokenizer.model", lambda path: path.write_bytes(b"x"), ["is not the tokenizer of notes"]),
        ("phase1.lock.json", lambda path: path.write_text("{}"), [""]),
    ],
)
def test_damage_is_named(data, file, damage, lines):
    damage(data / file)
    reported = damage_of(data)
    for line, expected in zip(reported[: len(lines)], lines, strict=True):
        assert line.startswith(f"{file}: {expected}")


def edit_manifest(data: Path, **fields) -> None:
    content = shards.read_manifest(data / "notes")
    shards.write_manifest(data / "notes", {**content, **fields})


def test_a_foreign_shard_with_a_fitting_manifest_is_seen_by_its_documents(data):
    # hashes only show that file and manifest agree; an index must fit the tokens
    path = data / "notes/shard-00002.docs.zst"
    ids, lengths, _ = shards.read_documents(path)

    def damage_with(ids: np.ndarray, lengths: np.ndarray) -> list[str]:
        """Give shard 2 this index, with which the manifest agrees; return the damage."""
        docs = write_documents(path, ids, lengths)
        entries = shards.read_manifest(data / "notes")["shards"]
        # hashes and manifest agree: only the tokens contradict the index
        entries[2] = {**entries[2], "docs": docs}
        edit_manifest(data, shards=entries)
        return damage_of(data)

    for fewer, message in (
        (ids[:-1], rf"lists {len(ids) - 1} documents, {len(ids)} begin in"),
        (ids, "its documents do not"),
    ):
        lines = damage_with(fewer, lengths[::-1][: len(fewer)])
        assert any(re.search(rf"shard-00002.docs.zst: {message}", line) for line in lines)
    held_out = np.array([5, *ids[1:]], ids.dtype)
    lines = damage_with(held_out, lengths)
    assert any("shard-00002.docs.zst: lists documents that are held out" in line for line in lines)


def test_every_damage_has_its_remedy(data):
    last = len(shards.read_manifest(data / "notes")["shards"])
    # a published file is a hard link of its unit's: both must go
    for path, unit in (
        ("notes/shard-00003.bin", "notes/unit-00003"),
        ("notes/valid.bin", f"notes/unit-{last:05d}"),
        ("sums/shard-00099.bin", "sums/unit-00099"),
        ("phase1.lock.json", ""),
    ):
        commands = verify.remedy(
            Path("a recipe.toml"), data, [verify.Damage(data / path, "is damaged")]
        )
        assert commands[:-1] == ([f"rm -rf {data}/shuffle/{unit} {data}/{path}"] if unit else [])
        assert commands[-1] == f"python -m data_mixtures.prepare 'a recipe.toml' --out {data}"


def test_a_folder_with_parity_and_quarantined_shards_of_an_older_version_is_read(data):
    entries = shards.read_manifest(data / "notes")["shards"]
    for entry in entries:
        entry["parity"] = {"name": entry["name"].replace(".bin", ".parity"), "xxh3": "0"}
        (data / "notes" / entry["parity"]["name"]).write_bytes(b"parity")
    edit_manifest(data, shards=entries, quarantined=[])
    Mixture.open(data / "phase1.lock.json").sequences(0, 20)
    assert not report(data)
