"""kill -9 over the whole chain, of main process and workers: the next start goes on, and the
bytes are the same.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.data_mixtures.conftest import prepare_folder, write_notes, write_sums
from tests.data_mixtures.stages.hub_assets import HEADER, REPO, SOURCE, write_parquet
from tests.data_mixtures.stages.test_run import wait_for_end

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ("tokenizer.model", "phase1.lock.json", "numbers/*", "notes/*")
STAGES = ("fetch", "filter", "dedup", "tokenize", "runs", "order", "shuffle")
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


def write_recipe(folder: Path, files: int = 8) -> Path:
    """Parquet files of a mirror and two inputs of local text: 10 units from fetch to tokenize if
    there are 8 files, 2 and 25 after.
    """
    for number in range(files):
        path = folder / "mirror" / REPO / f"4plus/part_{number:06d}.parquet"
        write_parquet(path, 50 * number, 480 // files)
    write_notes(folder / "notes")
    write_sums(folder / "sums.jsonl", 100)
    header = HEADER.replace("windows_per_shard = 40", "windows_per_shard = 100")
    hub = SOURCE.format(name="numbers", repo=REPO, revision="abcdef0", configs='["4plus"]', more="")
    path = folder / "both.toml"
    path.write_text("\n".join([header, "[dedup]\nminhash = true", hub, LOCAL.format(folder=folder)]))
    return path


def command_of(path: Path, out: Path, *more: str) -> list[str]:
    line = [sys.executable, "-m", "data_mixtures.prepare", str(path), "--out", str(out)]
    return [*line, "--mirror", str(path.parent / "mirror"), *more]


def count_receipts(out: Path) -> int:
    # os.walk, since folders come and go meanwhile, which glob does not survive
    folders = ((Path(folder), files) for folder, _, files in os.walk(out))
    return sum("receipt.json" in files for folder, files in folders if folder.name.startswith("unit-"))


def family_of(process: subprocess.Popen) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def busy_workers(family: list[psutil.Process], out: Path) -> list[int]:
    """Process ids of the workers that have a unit; claims that killed workers left do not count."""
    with suppress(FileNotFoundError):
        busy = {int(claim.name) for claim in out.glob(".logs/*/workers/*") if claim.read_text()}
        return sorted(busy & {each.pid for each in family})
    return []


def published(out: Path) -> dict[str, bytes]:
    patterns = (*PUBLISHED, *(f"{name}/*/*/*" for name in STAGES))
    paths = {path for pattern in patterns for path in out.glob(pattern) if path.is_file()}
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(paths)}


def kill_at(moment: int, process: subprocess.Popen, out: Path, of_worker: bool, draw: random.Random) -> bool:
    """Kill the process, or a worker that has a unit, once so many receipts are there; whether it was a worker."""
    while process.poll() is None and count_receipts(out) < moment:
        time.sleep(0.005)  # a poll of the state, not of a time
    family = family_of(process)
    victims = busy_workers(family, out) if of_worker else []
    if not victims:
        process.kill()
        wait_for_end(family)  # workers end a moment after their main process
        return False
    with suppress(ProcessLookupError):
        os.kill(draw.choice(victims), signal.SIGKILL)
    return True


# of 80 files, pairs are merged to runs
@pytest.mark.parametrize(
    ("files", "kills"),
    [pytest.param(8, 4, marks=pytest.mark.job), pytest.param(80, 6, marks=pytest.mark.rotate)],
)
def test_kills_at_any_moment_change_nothing(files, kills, tmp_path):
    path, out, draw = write_recipe(tmp_path, files), tmp_path / "out", random.Random(20)
    prepare_folder(path, tmp_path / "whole", mirror=str(tmp_path / "mirror"))
    expected, total = published(tmp_path / "whole"), count_receipts(tmp_path / "whole")
    assert total > 50
    assert any((tmp_path / "whole/runs").glob("*/*")) == (files > 64)
    killed_mains = 0
    for number, moment in enumerate(sorted(draw.sample(range(1, total), kills))):
        line = command_of(path, out, "--workers", "2")
        process = subprocess.Popen(
            line, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        was_worker = kill_at(moment, process, out, number % 2 == 1, draw)
        killed_mains += not was_worker
        error = process.communicate()[1]
        if was_worker and process.returncode:  # otherwise it was between two units, and had nothing to lose
            assert process.returncode == 1, error
            assert "was killed" in error
            assert "run the same command again" in error
    assert killed_mains >= kills // 2
    done = subprocess.run(command_of(path, out, "--workers", "2"), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert published(out) == expected
    assert not list(out.rglob("*.partial"))
    assert not list(out.rglob("*.old"))
