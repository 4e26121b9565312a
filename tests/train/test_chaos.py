"""Test of a random fault every 20 steps, by a seed; final weights equal an undisturbed run's."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from tests.train.supervised import INTERVAL, STEPS, assert_same, run_undisturbed, supervise

EVERY = 20
OF_A_SAVE = ("full_disk", "kill_all_before_metadata", "kill_all_after_metadata")
OF_A_RANK = ("kill", "stop", "usr1", "sigterm_supervisor")
KINDS = (*OF_A_SAVE, *OF_A_RANK, "nan", "truncate")


def draw(steps: int, seed: int) -> list[dict[str, Any]]:
    # faults of a save come at a step that saves
    chance, faults = random.Random(seed), []
    for first in range(1, steps - EVERY // 2, EVERY):
        kind = chance.choice(KINDS)
        saves = [step for step in range(first, first + EVERY) if step % INTERVAL == 0]
        step = chance.choice(saves) if kind in OF_A_SAVE else chance.randrange(first, first + EVERY)
        # truncating needs a checkpoint to truncate, and an older one to go back to
        kind = "kill" if kind == "truncate" and step <= 2 * INTERVAL else kind
        rank = chance.randrange(2) if kind in OF_A_RANK else None
        faults.append({"kind": kind, "step": step, "rank": rank})
    return faults


@pytest.mark.rotate
@pytest.mark.timeout(1800)
def test_chaos(reference, phase1, tmp_path):
    # 40 steps have 2 faults, since a start costs its imports; CHAOS_STEPS=200 has 10
    steps, seed = int(os.environ.get("CHAOS_STEPS", STEPS)), int(os.environ.get("CHAOS_SEED", "4"))
    faults = draw(steps, seed)
    print(faults)
    if steps != STEPS:
        reference = run_undisturbed(tmp_path / "reference", phase1, steps, INTERVAL)
    status = 85
    # as sbatch would: asked to stop means start again
    while status == 85:
        run, status, output = supervise(tmp_path / "chaos", phase1, steps, INTERVAL, faults)
    assert status == 0, output
    assert_same(run, reference, steps)
    marks = {path.name.split(".")[1] for path in (tmp_path / "chaos").glob("faults.*.done")}
    assert len(marks) == len(faults)
