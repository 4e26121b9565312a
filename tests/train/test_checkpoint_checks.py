"""A run is neither extended nor cut in silence: the learning rate goes on where it was, or the start is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w

from train.checkpoint_checks import check_steps

SCHEDULE = {"warmup_steps": 20, "decay_ratio": 0.2, "decay_type": "linear", "min_lr_factor": 0.1}


def job(steps: int, **schedule: Any) -> Any:
    values = {"training": {"steps": steps}, "lr_scheduler": {**SCHEDULE, **schedule}}
    return SimpleNamespace(training=SimpleNamespace(steps=steps), to_dict=lambda: values)


@pytest.mark.parametrize(
    ("step", "steps", "schedule", "says"),
    [
        (300, 300, {}, None),  # finished: nothing to do
        (260, 300, {}, None),
        (240, 600, {}, None),  # still stable
        (240, 260, {"total_steps": 300}, None),  # ends earlier, on the same schedule
        (300, 301, {"total_steps": 300}, None),
        (240, 300, {"decay_type": "cosine"}, None),
        (300, 600, {}, "would jump at step 300: lr_scheduler.total_steps = 600 (before: 300)"),
        (250, 600, {}, "the decay had begun behind step 241. To train longer, start from a checkpoint of the stable "
         "part, steps 21 to 241"),
        (260, 300, {"decay_ratio": 0.1}, "lr_scheduler.decay_ratio = 0.1 (before: 0.2)"),
        (260, 300, {"decay_type": "cosine"}, "lr_scheduler.decay_type = cosine (before: linear)"),
        (230, 250, {}, "had begun behind step 201"),  # the new one decays by then
        (300, 200, {}, "training.steps = 200, but"),
        (240, 200, {"total_steps": 300}, "is at step 240 already"),
    ],
)  # fmt: skip
def test_the_rate_does_not_jump(tmp_path, step, steps, schedule, says):
    """A run of 300 steps whose decay begins at 240."""
    (tmp_path / "config.toml").write_text(tomli_w.dumps(job(300).to_dict()))
    if says is None:
        check_steps(tmp_path, step, job(steps, **schedule))
        return
    with pytest.raises(ValueError, match=r"^(the learning rate|training\.steps)") as refused:
        check_steps(tmp_path, step, job(steps, **schedule))
    assert says in str(refused.value)


def test_a_folder_without_a_config_goes_on(tmp_path):
    check_steps(tmp_path, 300, job(600))
