"""Settings with which evals.in_loop would never evaluate anything; that it evaluates
is tested with evals.watch.
"""

from __future__ import annotations

import pytest

from records.job import JobSections
from train.in_loop import InLoop


@pytest.mark.parametrize(("every_steps", "commands"), [(0, ["x"]), (7, ["x"]), (10, [])])
def test_settings_that_evaluate_nothing_are_refused(every_steps: int, commands: list[str]) -> None:
    job = JobSections()
    job.checkpoint.interval = 5  # type: ignore[attr-defined]  # TorchTitan's
    job.evals.every_steps, job.evals.commands = every_steps, commands
    with pytest.raises(
        ValueError, match=r"evals.every_steps = \d+ must be a multiple of checkpoint.interval = 5"
    ):
        InLoop(job)
