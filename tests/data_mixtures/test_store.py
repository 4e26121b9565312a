"""A data folder in S3: the same files as in a folder, after kills, and with what else there may be."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from data_mixtures import __main__ as commands
from data_mixtures import store
from tests.data_mixtures.test_prepare import files_of

ROOT = Path(__file__).resolve().parents[2]
OUT = Path("s3://bucket/data")


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch) -> Path:
    """Where copies are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def few_shards(recipe_path) -> Path:
    recipe_path.write_text(
        recipe_path.read_text().replace("windows_per_shard = 40", "windows_per_shard = 400")
    )
    return recipe_path


def stored(s3) -> dict[str, bytes]:
    found = s3.cat(s3.find("bucket/data"))
    return {name.removeprefix("bucket/data/"): content for name, content in found.items()}


def published(files: dict[str, bytes]) -> dict[str, bytes]:
    stages = ("shuffle/", ".")  # files of shuffle are links in a folder, and move in a store
    return {name: content for name, content in files.items() if not name.startswith(stages)}


@pytest.mark.job
def test_a_bucket_holds_the_files_of_a_folder(few_shards, run_prepare, tmp_path, s3, scratch):
    run_prepare(few_shards, tmp_path / "out")
    expected = published(files_of(tmp_path / "out"))
    assert "built" in run_prepare(few_shards, OUT, workers=2)
    assert published(stored(s3)) == expected
    assert "notes/shard-00000.bin" in stored(s3)
    assert not s3.glob("bucket/data/shuffle/*/*/*.bin")
    assert not s3.exists("bucket/data/.lock")
    left = [path for path in scratch.glob("data_mixtures-*/*/*/*/unit-*/*") if path.suffix != ".json"]
    assert not left, "data leave this disk"
    printed = run_prepare(few_shards, OUT)
    assert "built" not in printed
    assert printed.count(" 0 units done") == 5
    assert published(stored(s3)) == expected

    s3.rm("bucket/data/notes/shard-00001.bin")
    with pytest.raises(
        ValueError, match=r"s3://bucket/data/notes lacks files of notes/unit-00001; start again"
    ):
        run_prepare(few_shards, OUT)
    run_prepare(few_shards, OUT)
    assert published(stored(s3)) == expected
    s3.pipe("bucket/data/tokenize/sums/unit-00000/tokens.bin", b"another")
    s3.rm("bucket/data/shuffle/sums/unit-00002/receipt.json")
    with pytest.raises(ValueError, match=r"tokens.bin is not what 'tokenize' wrote"):
        run_prepare(few_shards, OUT)
    run_prepare(few_shards, OUT)
    assert published(stored(s3)) == expected


@pytest.mark.job
def test_who_has_the_bucket_and_what_needs_a_disk(few_shards, run_prepare, s3):
    with pytest.raises(ValueError, match=r"s3://nobody/data cannot be written: FileNotFoundError: .*bucket"):
        run_prepare(few_shards, Path("s3://nobody/data"))
    given = [str(few_shards), "--out", "s3://bucket/data"]
    s3.pipe("bucket/data/.lock", b"process 7 on elsewhere")
    with pytest.raises(
        ValueError, match=r"s3://bucket/data \(held by process 7 on elsewhere\); wait for it, or del"
    ):
        run_prepare(few_shards, OUT)
    s3.pipe("bucket/data/.lock", f"process 7 on {store.host_name()}".encode())  # it was killed here
    commands.run(["plan", *given])
    commands.run(["fetch", *given])
    with pytest.raises(ValueError, match="fetch of 'notes' is still needed: 1 units are not through filter"):
        commands.run(["free", *given, "--stage", "fetch"])
    commands.run(["filter", *given])
    commands.run(["free", *given, "--stage", "fetch"])
    assert not s3.glob("bucket/data/fetch/*/*/*.parquet")
    run_prepare(few_shards, OUT)
    for name in ("verify", "stats"):
        with pytest.raises(ValueError, match=rf"{name} reads all data, .* of s3://bucket/data to a folder"):
            commands.run([name, *given])


@pytest.mark.rotate
def test_kills_change_nothing_in_a_bucket(few_shards, run_prepare, tmp_path, s3):
    run_prepare(few_shards, tmp_path / "out")
    expected = published(files_of(tmp_path / "out"))
    command = [sys.executable, "-m", "data_mixtures.prepare", str(few_shards), "--out", "s3://bucket/data"]
    for moment in (3, 9):  # of 14 units
        process = subprocess.Popen([*command, "--workers", "2"], cwd=ROOT, stdout=subprocess.DEVNULL)
        while process.poll() is None and len(s3.glob("bucket/data/*/*/*/receipt.json")) < moment:
            time.sleep(0.01)
        process.kill()
        process.wait()
    subprocess.run([*command, "--workers", "2"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert published(stored(s3)) == expected
