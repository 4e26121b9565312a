"""Tiny data folders: one prepared from text in the test, one made of counting tokens whose
every window is known.
"""

import json
import random
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import fsspec
import numpy as np
import pytest
from rich.console import Console

from data_mixtures import mixture, prepare, shards
from data_mixtures.stages.run import Options

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
    """60 files of random words, every fifth one a copy, some with text that looks like control tokens."""
    draw = random.Random(3)
    words = [
        "sun",
        "moon",
        "rain",
        "</s>",
        "<s>",
        "<unk>",
        "<0x0A>",
        "über",
        "東京",
        "return",
        "def",
        "12",
        "345\n",
    ]
    folder.mkdir()
    for i in range(60):
        text = " ".join(draw.choice(words) for _ in range(draw.randint(60, 200)))
        if i % 5 == 4:
            text = (folder / f"{i - 1}.txt").read_text(encoding="utf-8")
        (folder / f"{i}.txt").write_text(text, encoding="utf-8")
    (folder / "latin.txt").write_bytes("grüße ".encode("latin-1") * 50)


def write_sums(path: Path, count: int) -> None:
    """Documents of about 300 characters, one a line."""
    draw = random.Random(4)
    names, things = (
        ("Ada", "Ben", "Chloe", "Diego", "Emma", "Farid"),
        ("apples", "bricks", "coins", "marbles", "tickets"),
    )
    texts = []
    for _ in range(count):
        name, thing, numbers = (
            draw.choice(names),
            draw.choice(things),
            [draw.randint(1, 99) for _ in range(8)],
        )
        steps = [
            f"Then {name} buys {n} more {thing}, which makes {sum(numbers[:i])}."
            for i, n in enumerate(numbers)
        ]
        texts.append("\n".join([f"How many {thing} does {name} have?", *steps]))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


@pytest.fixture
def recipe_path(tmp_path: Path) -> Path:
    write_notes(tmp_path / "notes")
    write_sums(tmp_path / "sums.jsonl", 200)
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE.format(folder=tmp_path), encoding="utf-8")
    return path


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[fsspec.AbstractFileSystem]:
    """A server that speaks S3, empty but for s3://bucket; where it is, the environment says."""
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    names = {"ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s", "DEFAULT_REGION": "us-east-1"}
    for name, value in {**names, "ENDPOINT_URL": f"http://{host}:{port}"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    system = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
    if system.exists("bucket"):  # moto keeps it
        system.rm("bucket", recursive=True)
    system.makedirs("bucket")
    forkserver._forkserver._stop()  # workers have the environment in which it was started
    yield system
    forkserver._forkserver._stop()
    server.stop()


@pytest.fixture
def run_prepare():
    """Prepare as the command does; returns what was printed."""

    def run(path: Path, out: Path, workers: int = 1, replace: bool = False) -> str:
        console = Console(record=True, width=200, quiet=False)
        prepare.prepare(path, out, Options(workers), console, replace=replace)
        return console.export_text()

    return run


@pytest.fixture
def counting_data(tmp_path: Path):
    """A folder whose source s has the tokens s*1000, s*1000+1, ...: its window i starts at s*1000 + i*S."""

    def make(windows=(50, 23, 9), weights=(6, 3, 1), phase2=(1, 0, 4), seq_len=4, cap=3, per_shard=8) -> Path:
        names = [f"s{i}" for i in range(len(windows))]
        for i, (name, count) in enumerate(zip(names, windows, strict=True)):
            folder = tmp_path / name
            folder.mkdir()
            tokens = (i * 1000 + np.arange(count * seq_len + 1)).astype(np.uint16)
            stride, written = per_shard * seq_len, []
            for number, first in enumerate(range(0, count * seq_len, stride)):
                cut = tokens[first : first + stride + 1]
                written.append(shards.write_windows(folder / f"shard-{number:05d}.bin", cut, seq_len))
            valid = shards.write_windows(folder / shards.VALID, tokens, seq_len)
            of_tokens = dict(zip(shards.TOKENIZER_FACTS, ("t", 65_536, 2, 1, 2), strict=True))
            manifest = {"category": "web", "seq_len": seq_len, **of_tokens}
            shards.write_manifest(folder, {**manifest, "windows": count, "shards": written, "valid": valid})
        for phase, shares in (("phase1", weights), ("phase2", phase2)):
            mixture.pin(tmp_path, phase, dict(zip(names, shares, strict=True)), 5, seq_len, cap)
        return tmp_path

    return make
