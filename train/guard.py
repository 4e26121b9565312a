"""Decides, before the optimizer moves, whether a step may count: finite, and no spike against the steps before it.

A non-finite gradient ruins the weights in one step, and a checkpoint of ruined weights pushes the good ones out. So the
question comes first; a step that is refused leaves weights, moments and statistics as they were.
"""

from __future__ import annotations

import json
import math
from typing import Any

from .statistics import RunningZ


class UncleanStep(Exception):
    """A step was refused; its text says why. Raised on every rank at the same place."""


class Guard:
    """Sees every step; 0 as a limit means that spikes of this kind are let through."""

    def __init__(self, section: Any):
        self.loss, self.grad_norm = RunningZ(section.spike_window), RunningZ(section.spike_window)
        self.max_loss_z, self.max_grad_norm_z = section.max_loss_z, section.max_grad_norm_z

    def check(self, loss: float, grad_norm: float) -> None:
        """Take a step into the statistics. Raises UncleanStep instead when it may not count."""
        for name, value, running, limit in (
            ("loss", loss, self.loss, self.max_loss_z),
            ("gradient norm", grad_norm, self.grad_norm, self.max_grad_norm_z),
        ):
            if not math.isfinite(value):
                raise UncleanStep(f"the {name} is {value}")
            z = running.score(value)
            if limit and z > limit:
                raise UncleanStep(f"the {name} is {value:.6g}, {z:.1f} deviations above the last steps (limit {limit})")
        self.loss.add(loss)
        self.grad_norm.add(grad_norm)

    def state_dict(self) -> str:
        """Plain text for the checkpoint: without its memory the guard of a restart would be blind at first."""
        return json.dumps({"loss": list(self.loss.values), "grad_norm": list(self.grad_norm.values)})

    def load_state_dict(self, state: str) -> None:
        values = json.loads(state)
        for running, key in ((self.loss, "loss"), (self.grad_norm, "grad_norm")):
            for value in values[key]:
                running.add(value)
