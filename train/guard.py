"""Decide, before the optimizer moves, whether a step may count: finite, and no spike."""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from typing import Any

# standard deviations in a median absolute deviation of a normal distribution
NORMAL_SCALE = 1.4826
# significant digits of a logged float: in a window of nearly equal values, rounding must not look
# like an outlier
MIN_RELATIVE_DEVIATION = 1e-6


class RunningZ:
    """Robust z-score against the last `window` values, which are finite."""

    def __init__(self, window: int):
        self.window = window
        self.values: deque[float] = deque(maxlen=window)

    def score(self, value: float) -> float:
        """Return the deviations of `value` from the values so far; 0.0 while there are too few."""
        # of a few values the spread is no estimate: the first steps of a job would be refused
        if len(self.values) < self.window / 4:
            return 0.0
        # unlike mean and standard deviation, the spike itself barely moves them
        centre = statistics.median(self.values)
        spread = NORMAL_SCALE * statistics.median(abs(v - centre) for v in self.values)
        spread = max(spread, MIN_RELATIVE_DEVIATION * abs(centre), math.ulp(0.0))
        return (value - centre) / spread

    def add(self, value: float) -> None:
        self.values.append(value)


class BadStep(Exception):
    """A step was refused, on every rank at the same place."""


class Guard:
    """Checks every step; a limit of 0 lets spikes of its kind pass."""

    def __init__(self, section: Any):
        self.loss, self.grad_norm = RunningZ(section.spike_window), RunningZ(section.spike_window)
        self.max_loss_z, self.max_grad_norm_z = section.max_loss_z, section.max_grad_norm_z

    def check(self, loss: float, grad_norm: float) -> dict[str, float]:
        """Add a step to the statistics, or raise BadStep and leave them as they are.

        Returns:
            The z-scores that were compared with the limits, by their names in metrics.jsonl.
        """
        scores = {}
        for name, key, value, running, limit in (
            ("loss", "loss_z", loss, self.loss, self.max_loss_z),
            ("gradient norm", "grad_norm_z", grad_norm, self.grad_norm, self.max_grad_norm_z),
        ):
            # it would ruin the weights, and checkpoints of ruined weights push out the good ones
            if not math.isfinite(value):
                raise BadStep(f"the {name} is {value}")
            z = scores[key] = running.score(value)
            if limit and z > limit:
                raise BadStep(
                    f"the {name} is {value:.6g}, {z:.1f} deviations above the last steps (limit {limit})"
                )
        # of accepted steps alone: refused values would widen the spread until spikes pass
        self.loss.add(loss)
        self.grad_norm.add(grad_norm)
        return scores

    def state_dict(self) -> str:
        """Return JSON for the checkpoint, so that a restarted guard is not blind."""
        return json.dumps(
            {"loss": list(self.loss.values), "grad_norm": list(self.grad_norm.values)}
        )

    def load_state_dict(self, state: str) -> None:
        values = json.loads(state)
        for running, key in ((self.loss, "loss"), (self.grad_norm, "grad_norm")):
            running.values.extend(values[key])
