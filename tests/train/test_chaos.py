"""A random fault every 20 steps, drawn from a seed; the final weights are the undisturbed ones, bit for bit.

CI runs 40 steps with 2 faults, since a start costs its imports; `make nightly` runs 200 steps with 10.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from records.files import read_lines
from tests.train.supervised import INTERVAL, STEPS, assert_same, supervise, undisturbed

EVERY = 20
KINDS = (
    "kill", "stop", "usr1", "nan", "truncate", "full_disk", "kill_all_before_metadata", "kill_all_after_metadata",
    "sigterm_supervisor",
)  # fmt: skip


def draw(steps: int, seed: int) -> list[dict[str, Any]]:
    """One fault in every EVERY steps; those of a save at a step that saves."""
    chance, faults = random.Random(seed), []
    for first in range(1, steps - EVERY // 2, EVERY):
        kind = chance.choice(KINDS)
        saves = [step for step in range(first, first + EVERY) if step % INTERVAL == 0]
        at_save = kind in ("full_disk", "kill_all_before_metadata", "kill_all_after_metadata")
        step = chance.choice(saves) if at_save else chance.randrange(first, first + EVERY)
        # truncating needs a checkpoint to truncate, and an older one to go back to
        kind = "kill" if kind == "truncate" and step <= 2 * INTERVAL else kind
        rank = chance.randrange(2) if kind in ("kill", "stop", "usr1", "sigterm_supervisor") else None
        faults.append({"kind": kind, "step": step, "rank": rank})
    return faults


@pytest.mark.rotate
def test_a_killed_rank_changes_nothing(prepared_data: Path, tmp_path: Path) -> None:
    """The short form that `make test` runs: one rank dies two steps after a checkpoint."""
    lock, steps = prepared_data / "phase1.lock.json", 2 * INTERVAL
    fault = {"kind": "kill", "step": INTERVAL + 2, "rank": 1}
    run, status, said = supervise(tmp_path / "killed", lock, steps, INTERVAL, [fault], warm=False)
    assert status == 0, said
    assert_same(run, undisturbed(tmp_path / "reference", lock, steps, INTERVAL), steps)
    attempts = read_lines(run / "attempts.jsonl")
    assert [attempt["step"] for attempt in attempts] == [0, INTERVAL]


@pytest.mark.rotate
@pytest.mark.timeout(1800)
def test_chaos(reference: Path, prepared_data: Path, tmp_path: Path) -> None:
    steps = int(os.environ.get("CHAOS_STEPS", STEPS))
    lock, faults = (
        prepared_data / "phase1.lock.json",
        draw(steps, seed=int(os.environ.get("CHAOS_SEED", "4"))),
    )
    print(faults)
    if steps != STEPS:
        reference = undisturbed(tmp_path / "reference", lock, steps, INTERVAL)
    status = 85
    while status == 85:  # as sbatch would: asked to stop means start again
        run, status, said = supervise(tmp_path / "chaos", lock, steps, INTERVAL, faults)
    assert status == 0, said
    assert_same(run, reference, steps)
    assert len({path.name.split(".")[1] for path in (tmp_path / "chaos").glob("faults.*.done")}) == len(
        faults
    )
