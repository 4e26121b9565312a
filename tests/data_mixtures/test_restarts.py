"""Test of kill -9 over the whole chain: workers end, the next start gives the same bytes.

A worker that is killed: stages/test_run.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.data_mixtures.conftest import files_of, prepare_folder, write_notes, write_sums
from tests.data_mixtures.stages.hub_assets import HEADER, REPO, SOURCE, write_parquet
from tests.data_mixtures.stages.test_run import wait_for_end

ROOT = Path(__file__).resolve().parents[2]
KILLS = 4
LOCAL = """
[sources.notes]
category = "web"
min_bytes = 1000
inputs = [
  {{ kind = "text", paths = ["{folder}/notes/*.txt"] }},
  {{ kind = "jsonl", max_bytes = 20_000, paths = ["{folder}/sums.jsonl"] }},
]
[phase1]
numbers = 3
notes = 1
"""


def write_recipe(folder: Path) -> Path:
    # 10 units from fetch to tokenize, 2 and 25 after
    for number in range(8):
        path = folder / "mirror" / REPO / f"4plus/part_{number:06d}.parquet"
        write_parquet(path, 50 * number, 60)
    write_notes(folder / "notes")
    write_sums(folder / "sums.jsonl", 100)
    header = HEADER.replace("windows_per_shard = 40", "windows_per_shard = 100")
    hub = SOURCE.format(name="numbers", repo=REPO, revision="abcdef0", configs='["4plus"]', more="")
    path = folder / "both.toml"
    path.write_text(
        "\n".join([header, "[dedup]\nminhash = true", hub, LOCAL.format(folder=folder)])
    )
    return path


def command_of(path: Path, out: Path, *more: str) -> list[str]:
    line = [sys.executable, "-m", "data_mixtures.prepare", str(path), "--out", str(out)]
    return [*line, "--mirror", str(path.parent / "mirror"), *more]


def count_receipts(out: Path) -> int:
    # os.walk, since folders come and go meanwhile, which glob does not survive
    folders = ((Path(folder), files) for folder, _, files in os.walk(out))
    return sum(
        "receipt.json" in files for folder, files in folders if folder.name.startswith("unit-")
    )


def family_of(process: subprocess.Popen) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@pytest.mark.job
def test_kills_at_any_moment_change_nothing(tmp_path):
    path = write_recipe(tmp_path)
    out = tmp_path / "out"
    draw = random.Random(20)
    prepare_folder(path, tmp_path / "whole", mirror=str(tmp_path / "mirror"))
    expected = files_of(tmp_path / "whole")
    total = count_receipts(tmp_path / "whole")
    assert total > 50
    killed = 0
    # kills after so many receipts: in different stages, and in the middle of one
    for moment in sorted(draw.sample(range(1, total), KILLS)):
        process = subprocess.Popen(command_of(path, out, "--workers", "2"), cwd=ROOT)
        while process.poll() is None and count_receipts(out) < moment:
            # polls the state, so a slow machine kills at the same unit
            time.sleep(0.005)
        family = family_of(process)
        process.kill()
        killed += process.wait() == -signal.SIGKILL
        # workers end a moment after their main process; they would write beside the next start
        wait_for_end(family)
    # a fast machine may finish before a late kill
    assert killed >= KILLS // 2
    last = subprocess.run(
        command_of(path, out, "--workers", "2"), cwd=ROOT, capture_output=True, text=True
    )
    assert last.returncode == 0, last.stderr
    assert files_of(out) == expected
    assert not list(out.rglob("*.partial"))
    assert not list(out.rglob("*.old"))
