"""Tiny data folders: one prepared from text, one of counting tokens whose every window is known."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from rich.console import Console

from data_mixtures import mixture, prepare, shards
from data_mixtures.stages.run import Options

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
seed = 11
seq_len = 32
windows_per_shard = 40
valid_per_10000 = 1000
max_document_chars = 5000
epoch_cap = 3
tokenizer = {{ vocab_size = 400, train_bytes = 60_000, character_coverage = 0.999 }}

[sources.notes]
category = "web"
min_bytes = 1000
inputs = [{{ kind = "text", max_bytes = 200_000, paths = ["{folder}/notes/*.txt"] }}]

[sources.sums]
category = "math"
min_bytes = 1000
inputs = [{{ kind = "jsonl", max_bytes = 60_000, paths = ["{folder}/sums.jsonl"] }}]

[phase1]
notes = 7
sums = 3

[phase2]
notes = 1
sums = 5
"""


def write_notes(folder: Path) -> None:
    """Write 60 files of random words, every fifth a copy, some with text like control tokens."""
    draw = random.Random(3)
    # control tokens spelled out, and characters that need byte fallback
    line = "sun moon rain </s> <s> <unk> <0x0A> über 東京 return def 12 345\n"
    words = line.split(" ")
    folder.mkdir()
    for i in range(60):
        text = " ".join(draw.choice(words) for _ in range(draw.randint(60, 200)))
        # an exact copy: dropped as a duplicate, whatever its file
        if i % 5 == 4:
            text = (folder / f"{i - 1}.txt").read_text(encoding="utf-8")
        (folder / f"{i}.txt").write_text(text, encoding="utf-8")
    # not UTF-8: counted as dropped, with its reason
    (folder / "latin.txt").write_bytes("grüße ".encode("latin-1") * 50)


def write_sums(path: Path, count: int) -> None:
    """Write documents of about 300 characters as JSON lines."""
    draw = random.Random(4)
    names = ("Ada", "Ben", "Chloe", "Diego", "Emma", "Farid")
    things = ("apples", "bricks", "coins", "marbles", "tickets")
    texts = []
    for _ in range(count):
        name = draw.choice(names)
        thing = draw.choice(things)
        numbers = [draw.randint(1, 99) for _ in range(8)]
        lines = [f"How many {thing} does {name} have?"]
        lines += [
            f"Then {name} buys {n} more {thing}, which makes {sum(numbers[:i])}."
            for i, n in enumerate(numbers)
        ]
        texts.append("\n".join(lines))
    write_lines(path, texts)


def write_lines(path: Path, texts: list[str], field: str = "text") -> None:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts), encoding="utf-8")


def write_recipe(folder: Path) -> Path:
    """Write RECIPE with its text beside it."""
    write_notes(folder / "notes")
    write_sums(folder / "sums.jsonl", 200)
    path = folder / "tiny.toml"
    path.write_text(RECIPE.format(folder=folder), encoding="utf-8")
    return path


def prepare_folder(path: Path, out: Path, workers: int = 1, **options: Any) -> str:
    """Prepare as the command does; return what it prints."""
    console = Console(record=True, width=200, quiet=False)
    prepare.prepare(path, out, Options(workers), console, **options)
    return console.export_text()


def code_blocks(page: str) -> list[tuple[str, str]]:
    """Return (language, code) of each fenced block of a page in docs/."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)


def run_shell(script: str, folder: Path, **environment: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # scripts of docs/ run in another folder, and must import this checkout
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **environment}
    line = ["bash", "-euc", script]
    process = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    return process.stdout + process.stderr


def files_of(folder: Path) -> dict[str, bytes]:
    """Read all files but logs and the lock, which name processes."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    files = (path for path in paths if not {".logs", ".lock"} & set(path.parts))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def flip(path: Path, byte: int | None = None) -> None:
    """Change one bit of a file, by default in its middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if byte is None else byte] ^= 1
    # the file that a link leads to stays as it is
    path.unlink()
    path.write_bytes(content)


@pytest.fixture(scope="session")
def tiny_folder(shared):
    """RECIPE prepared once in out/, for tests that only read."""
    return shared(
        "tiny_folder", lambda folder: prepare_folder(write_recipe(folder), folder / "out")
    )


@pytest.fixture
def tiny_copy(tiny_folder, tmp_path):
    """Copy tiny_folder with a recipe of its own, so the next start plans its text anew."""
    for name in ("notes", "sums.jsonl", "out"):
        # links stay links: published shards are those of the stage shuffle
        subprocess.run(["cp", "-a", tiny_folder / name, tmp_path], check=True)
    (tmp_path / "tiny.toml").write_text(RECIPE.format(folder=tmp_path), encoding="utf-8")
    return tmp_path


@pytest.fixture
def recipe_path(tmp_path):
    return write_recipe(tmp_path)


@pytest.fixture
def s3(monkeypatch):
    """Start an S3 server with an empty s3://bucket, and point the environment at it."""
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    names = {"ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s", "DEFAULT_REGION": "us-east-1"}
    for name, value in {**names, "ENDPOINT_URL": f"http://{host}:{port}"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    system = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
    # clients of earlier servers would be reused
    type(system).clear_instance_cache()
    # moto keeps buckets from server to server
    if system.exists("bucket"):
        system.rm("bucket", recursive=True)
    system.makedirs("bucket")
    # the fork server's workers keep the environment in which it was started
    forkserver._forkserver._stop()
    yield system
    forkserver._forkserver._stop()
    server.stop()


def write_counting(
    folder: Path, source: str, count: int, begin: int, seq_len: int = 4, per_shard: int = 8
):
    """Write `count` windows of tokens begin, begin + 1, ..., replacing an older source."""
    shutil.rmtree(folder / source, ignore_errors=True)
    (folder / source).mkdir()
    # neighbouring windows share a token, so n windows have n * seq_len + 1
    tokens = (begin + np.arange(count * seq_len + 1)).astype(np.uint16)
    stride = per_shard * seq_len
    entries = []
    for number, first in enumerate(range(0, count * seq_len, stride)):
        part = tokens[first : first + stride + 1]
        entries.append(
            shards.write_windows(folder / source / f"shard-{number:05d}.bin", part, seq_len)
        )
    valid = shards.write_windows(folder / source / shards.VALID, tokens, seq_len)
    facts = dict(zip(shards.TOKENIZER_FACTS, ("t", 65_536, 2, 1, 2), strict=True))
    manifest = {"category": "web", "seq_len": seq_len, **facts, "windows": count}
    shards.write_manifest(folder / source, {**manifest, "shards": entries, "valid": valid})


@pytest.fixture
def counting_data(tmp_path):
    """Make folders in which window i of source s begins with token s*1000 + i*seq_len."""

    def make(
        windows=(50, 23, 9), weights=(6, 3, 1), phase2=(1, 0, 4), seq_len=4, cap=3, per_shard=8
    ) -> Path:
        for i, count in enumerate(windows):
            write_counting(tmp_path, f"s{i}", count, i * 1000, seq_len, per_shard)
        for phase, shares in (("phase1", weights), ("phase2", phase2)):
            weight_of = {f"s{i}": share for i, share in enumerate(shares)}
            # seed 5, which the reference of test_mixture assumes
            mixture.pin(tmp_path, phase, weight_of, 5, seq_len, cap)
        return tmp_path

    return make
