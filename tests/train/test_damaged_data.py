"""A flipped bit in a shard that a running job comes to: all ranks end, and the run folder says where it is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data_mixtures.mixture import Mixture
from records.files import read_lines
from tests.train.supervised import GLOBAL_BATCH, RANKS, ROOT, arguments, environment

pytestmark = pytest.mark.job

STEPS, INTERVAL = 60, 5


def test_a_damaged_block_ends_the_job_with_its_name(prepared_data: Path, tmp_path: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(prepared_data, data)
    lock, shard = data / "phase1.lock.json", data / "web/shard-00001.bin"
    content = bytearray(shard.read_bytes())
    content[2000] ^= 16
    shard.write_bytes(content)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}", "-m", "train",
        *arguments(run, lock, STEPS, INTERVAL),
    ]  # fmt: skip
    job = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=900)
    assert job.returncode == 1

    mixture = Mixture.open(lock)
    # steps that need no window of shard 1, which begins behind the 64th of web
    clean = max(n for n in range(STEPS) if mixture.windows_per_source(n * GLOBAL_BATCH)["web"] <= 64)
    assert 0 < clean < STEPS - 1
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, clean + 1)), (
        "trained up to the damage, and not on it"
    )
    outcome = json.loads((run / "outcome.json").read_text())
    crashes = [event for event in read_lines(run / "events.jsonl") if event["kind"] == "crash"]
    named = [
        event for event in crashes if f"{shard}: block 0 of 1 (bytes 0 to 4098) is damaged" in event["reason"]
    ]
    assert named, crashes
    assert all("verify" in event["reason"] and "same bytes" in event["reason"] for event in named)
    assert named[0]["step"] == clean + 1
    assert outcome["code"] == 1
    assert f"{shard}: block 0 of 1" in job.stderr + job.stdout
    assert list((run / "checkpoint").glob("step-*")), "what was trained before stays"
