"""kill -9 over the whole chain, of main process and workers: the next start goes on, and the
bytes are the same.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from data_mixtures import mixture, prepare
from data_mixtures.stages.run import Options
from tests.data_mixtures.conftest import write_notes, write_sums
from tests.data_mixtures.stages.hub_assets import HEADER, REPO, SOURCE, write_parquet

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ("tokenizer.model", "phase1.lock.json", "numbers/*", "notes/*", "fetch/*/*/*", "filter/*/*/*",
             "dedup/*/*/*", "tokenize/*/*/*", "runs/*/*/*", "order/*/*/*", "shuffle/*/*/*")  # fmt: skip


@pytest.fixture
def recipe_path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return write_recipe(tmp_path, getattr(request, "param", 8))


def write_recipe(tmp_path: Path, files: int = 8) -> Path:
    """Eight Parquet files of a mirror and two inputs of local text: 10 units from fetch to tokenize,
    2 and 25 after.
    """
    for number in range(files):
        write_parquet(
            tmp_path / "mirror" / REPO / f"4plus/part_{number:06d}.parquet", 50 * number, 480 // files
        )
    write_notes(tmp_path / "notes")
    write_sums(tmp_path / "sums.jsonl", 100)
    local = f"""
[sources.notes]
category = "web"
min_bytes = 1000
inputs = [
  {{ kind = "text", paths = ["{tmp_path}/notes/*.txt"] }},
  {{ kind = "jsonl", max_bytes = 20_000, paths = ["{tmp_path}/sums.jsonl"] }},
]
"""
    hub = SOURCE.format(name="numbers", repo=REPO, revision="abcdef0", configs='["4plus"]', more="")
    path = tmp_path / "both.toml"
    header = HEADER.replace("windows_per_shard = 40", "windows_per_shard = 100")
    path.write_text(
        "\n".join([header, "[dedup]\nminhash = true", hub, local, "[phase1]\nnumbers = 3\nnotes = 1\n"])
    )
    return path


def start(path: Path, out: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "data_mixtures.prepare", str(path), "--out", str(out), "--workers", "2"]
    command += ["--mirror", str(path.parent / "mirror")]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def receipts(out: Path) -> int:
    # os.walk, since folders come and go meanwhile, which glob does not survive
    return sum(
        "receipt.json" in files for folder, _, files in os.walk(out) if Path(folder).name.startswith("unit-")
    )


def workers_at_work(out: Path) -> list[int]:
    found = []
    with suppress(FileNotFoundError):
        for claim in out.glob(".logs/*/workers/*"):
            if claim.read_text():
                found.append(int(claim.name))
    return found


def published(out: Path) -> dict[str, bytes]:
    found = {path for pattern in PUBLISHED for path in out.glob(pattern)}
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(found) if path.is_file()}


def test_a_comment_in_every_module_changes_nothing(recipe_path, tmp_path):
    """A run must be able to start again after other code was checked out, and the next phase been pinned."""
    out, mirror = tmp_path / "out", tmp_path / "mirror"
    prepare.prepare(recipe_path, out, Options(), Console(quiet=True), str(mirror))
    before = published(out)
    lock = mixture.read_lock(out / "phase1.lock.json")
    shutil.copytree(ROOT / "data_mixtures", tmp_path / "code/data_mixtures")
    for path in (tmp_path / "code").rglob("*.py"):
        path.write_text(path.read_text() + "\n# a comment\n")
    recipe_path.write_text(recipe_path.read_text() + "[phase2]\nnumbers = 1\nnotes = 1\n")
    command = [sys.executable, "-m", "data_mixtures.prepare", recipe_path, "--out", out, "--mirror", mirror]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path / "code", env=environment, capture_output=True, text=True, check=True
    )
    assert [int(line.split()[1]) for line in done.stdout.splitlines() if " units done, " in line] == [0] * 8
    assert published(out) == before
    assert mixture.read_lock(out / "phase1.lock.json")["fingerprint"] == lock["fingerprint"]
    assert mixture.read_lock(out / "phase2.lock.json")["sources"][0]["content_sha256"]


# of 80 files, pairs are merged to runs
@pytest.mark.parametrize(
    "recipe_path",
    [pytest.param(8, marks=pytest.mark.job), pytest.param(80, marks=pytest.mark.rotate)],
    indirect=True,
)
def test_kills_at_any_moment_change_nothing(recipe_path, tmp_path):
    quiet = Console(quiet=True)
    prepare.prepare(recipe_path, tmp_path / "whole", Options(), quiet, str(tmp_path / "mirror"))
    expected = published(tmp_path / "whole")
    total, out, draw = receipts(tmp_path / "whole"), tmp_path / "out", random.Random(20)
    assert total > 50
    assert any((tmp_path / "whole/runs").glob("*/*")) == (total > 300)
    moments = sorted(draw.sample(range(1, total), 6))
    killed = {"main": 0, "worker": 0}
    for number, moment in enumerate(moments):
        process = start(recipe_path, out)
        while process.poll() is None and receipts(out) < moment:
            time.sleep(0.005)
        victims = workers_at_work(out) if number % 2 else []
        if victims:
            with suppress(ProcessLookupError):
                os.kill(draw.choice(victims), signal.SIGKILL)
                killed["worker"] += 1
        else:
            process.kill()
            killed["main"] += 1
        error = process.communicate(timeout=300)[1]
        if victims and process.returncode:  # otherwise it was between two units, and had nothing to lose
            assert process.returncode == 1, error
            assert "was killed" in error
            assert "run the same command again" in error
    final = start(recipe_path, out)
    _, error = final.communicate(timeout=300)
    assert final.returncode == 0, error
    assert killed["main"] >= 3
    assert published(out) == expected
    assert not list(out.rglob("*.partial"))
    assert not list(out.rglob("*.old"))
