"""Tests of a data folder in S3: the same files as locally, after kills, among others."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from data_mixtures import __main__ as commands
from data_mixtures import store
from tests.data_mixtures.conftest import files_of, prepare_folder, write_recipe

ROOT = Path(__file__).resolve().parents[2]
OUT = Path("s3://bucket/data")


def make_few_shards(folder: Path) -> None:
    path = write_recipe(folder)
    path.write_text(path.read_text().replace("windows_per_shard = 40", "windows_per_shard = 400"))
    prepare_folder(path, folder / "out")


@pytest.fixture
def recipe(shared, tmp_path, monkeypatch):
    """Make a recipe beside out/; copies of a store are made in tmp_path."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return shared("few_shards", make_few_shards) / "tiny.toml"


def pick_published(files: dict[str, bytes]) -> dict[str, bytes]:
    # files of shuffle stay in a folder as links; a store has none, so they move
    stages = ("shuffle/", ".")
    return {name: content for name, content in files.items() if not name.startswith(stages)}


def read_stored(s3) -> dict[str, bytes]:
    contents = s3.cat(s3.find("bucket/data"))
    return pick_published(
        {name.removeprefix("bucket/data/"): content for name, content in contents.items()}
    )


@pytest.mark.job
def test_a_bucket_holds_the_files_of_a_folder(recipe, s3, monkeypatch):
    expected = pick_published(files_of(recipe.parent / "out"))
    suffixes_here = set()
    push = store.Store.push

    def record(self, folder: Path) -> None:
        push(self, folder)
        suffixes_here.update(path.suffix for path in folder.iterdir())
        # somebody else writes into the same folder meanwhile
        s3.pipe("bucket/data/theirs.txt", b"of somebody else, meanwhile")

    with monkeypatch.context() as patch:
        patch.setattr(store.Store, "push", record)
        assert "built" in prepare_folder(recipe, OUT)
    assert suffixes_here == {".json"}, "data leave this disk"
    assert s3.cat("bucket/data/theirs.txt"), "what others put there stays"
    s3.rm("bucket/data/theirs.txt")
    assert read_stored(s3) == expected
    assert "notes/shard-00000.bin" in expected
    assert not s3.glob("bucket/data/shuffle/*/*/*.bin")
    assert not s3.exists("bucket/data/.lock")
    printed = prepare_folder(recipe, OUT)
    assert "built" not in printed
    assert printed.count(" 0 units done") == 5
    assert read_stored(s3) == expected

    # a published file is lost, and its unit was freed when it moved there
    s3.rm("bucket/data/notes/shard-00001.bin")
    lacks = r"s3://bucket/data/notes lacks files of notes/unit-00001; start again"
    with pytest.raises(ValueError, match=lacks):
        prepare_folder(recipe, OUT)
    # other bytes in an intermediate file, which a unit of shuffle must read again
    s3.pipe("bucket/data/tokenize/sums/unit-00000/tokens.bin", b"another")
    s3.rm("bucket/data/shuffle/sums/unit-00002/receipt.json")
    with pytest.raises(ValueError, match=r"tokens.bin is not what 'tokenize' wrote"):
        prepare_folder(recipe, OUT)
    prepare_folder(recipe, OUT, workers=2)
    assert read_stored(s3) == expected


@pytest.mark.job
def test_who_has_the_bucket_and_what_needs_a_disk(recipe, s3):
    with pytest.raises(
        ValueError, match=r"s3://nobody/data cannot be written: FileNotFoundError: .*bucket"
    ):
        prepare_folder(recipe, Path("s3://nobody/data"))
    arguments = [str(recipe), "--out", "s3://bucket/data", "--workers", "1"]
    s3.pipe("bucket/data/.lock", b"process 7 on elsewhere")
    message = r"s3://bucket/data \(held by process 7 on elsewhere\); wait for it, or del"
    with pytest.raises(ValueError, match=message):
        prepare_folder(recipe, OUT)
    # a lock of this host is stale: its process was killed
    s3.pipe("bucket/data/.lock", f"process 7 on {store.host_name()}".encode())
    commands.run(["plan", *arguments])
    commands.run(["fetch", *arguments])
    with pytest.raises(
        ValueError, match="fetch of 'notes' is still needed: 1 units are not through filter"
    ):
        commands.run(["free", *arguments, "--stage", "fetch"])
    commands.run(["filter", *arguments])
    commands.run(["free", *arguments, "--stage", "fetch"])
    assert not s3.glob("bucket/data/fetch/*/*/*.parquet")
    prepare_folder(recipe, OUT)
    for name in ("verify", "stats"):
        with pytest.raises(
            ValueError, match=rf"{name} reads all data, .* of s3://bucket/data to a folder"
        ):
            commands.run([name, *arguments])


@pytest.mark.rotate
def test_kills_change_nothing_in_a_bucket(recipe, s3):
    command = [
        sys.executable,
        "-m",
        "data_mixtures.prepare",
        str(recipe),
        "--out",
        "s3://bucket/data",
    ]
    # receipts at which to kill, of 14
    for moment in (3, 9):
        process = subprocess.Popen(
            [*command, "--workers", "2"], cwd=ROOT, stdout=subprocess.DEVNULL
        )
        while process.poll() is None and len(s3.glob("bucket/data/*/*/*/receipt.json")) < moment:
            # polls the state, so a slow machine kills at the same unit
            time.sleep(0.01)
        process.kill()
        process.wait()
    subprocess.run([*command, "--workers", "2"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert read_stored(s3) == pick_published(files_of(recipe.parent / "out"))
