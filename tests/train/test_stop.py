"""A stop request: exit status 85 only if the checkpoint of its step is on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from records.events import STOPPED, STOPPED_UNSAVED
from tests.train.runs import run_job
from tests.train.supervised import arguments


@pytest.mark.parametrize(("full_disk", "code"), [(False, STOPPED), (True, STOPPED_UNSAVED)])
def test_a_stop_whose_save_fails_is_no_85(prepared_data: Path, tmp_path: Path, full_disk: bool, code: int) -> None:
    """Signalled in step 3; the disk is full from step 2 on."""
    faults: list[dict[str, Any]] = [{"kind": "usr1", "step": 3, "rank": 1}]
    faults += [{"kind": "full_disk", "step": 2, "rank": None}] if full_disk else []
    (tmp_path / "faults.json").write_text(json.dumps(faults))
    job = arguments(tmp_path / "run", prepared_data / "phase1.lock.json", steps=6, interval=5)
    job += ["--experimental.custom_import", "tests.train.faults"]
    done = run_job(tmp_path / "run", job, 2, LANEFORMER_FAULTS=str(tmp_path / "faults.json"))
    outcome = json.loads((tmp_path / "run/outcome.json").read_text())
    assert (done.returncode, outcome["code"], outcome["step"]) == (code, code, 3), done.stdout[-3000:]
    assert (tmp_path / "run/checkpoint/step-3").exists() != full_disk
    assert ("could not be saved" in outcome["reason"]) == full_disk
