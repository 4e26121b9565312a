"""A flipped bit in a shard that a running job comes to: all ranks end, and the run folder says where it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from data_mixtures.mixture import Mixture
from records.files import read_lines
from tests.train.runs import GLOBAL_BATCH, metrics, run_job
from tests.train.supervised import RANKS, arguments

STEPS = 60


@pytest.mark.job
def test_a_damaged_block_ends_the_job_with_its_name(prepared_data: Path, tmp_path: Path) -> None:
    run, data = tmp_path / "run", shutil.copytree(prepared_data, tmp_path / "data")
    lock, shard = data / "phase1.lock.json", data / "web/shard-00001.bin"
    content = bytearray(shard.read_bytes())
    content[2000] ^= 16
    shard.write_bytes(content)
    mixture = Mixture.open(lock)
    # steps that need no window of shard 1, which begins behind the 64th of web
    clean = max(n for n in range(STEPS) if mixture.windows_per_source(n * GLOBAL_BATCH)["web"] <= 64)
    assert 4 < clean < STEPS - 1
    skip = ("--resilience.skip_sequences", "0", str((clean - 3) * GLOBAL_BATCH))  # to three steps before it
    job = run_job(run, [*arguments(run, lock, 6, 2), *skip], RANKS)
    assert job.returncode == 1
    assert [row["step"] for row in metrics(run)] == [1, 2, 3], "trained up to the damage, and not on it"
    assert json.loads((run / "outcome.json").read_text())["code"] == 1
    crashes = [event for event in read_lines(run / "events.jsonl") if event["kind"] == "crash"]
    damage = f"{shard}: block 0 of 1 (bytes 0 to 4098) is damaged"
    (crash, *_) = [event for event in crashes if damage in event["reason"]]
    assert crash["step"] == 4
    assert "verify" in crash["reason"]
    assert "same bytes" in crash["reason"]
    assert f"{shard}: block 0 of 1" in job.stdout
    assert [path.name for path in (run / "checkpoint").glob("step-*")] == ["step-2"], "what was trained stays"
