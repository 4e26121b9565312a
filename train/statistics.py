"""How unusual a value is against the ones before it: the z-score that the log carries and the guard decides by.

Median and median absolute deviation of a window, so that the spike to be found does not widen the scale it is measured
on, nor shift its centre, as it would with a mean and a standard deviation. The state is the list of values.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

NORMAL_SCALE = 1.4826  # standard deviations in a median absolute deviation of a normal distribution
# digits of a logged float that mean something: a window of nearly equal values must not make rounding an outlier
LEAST_RELATIVE_DEVIATION = 1e-6


class RunningZ:
    """Robust z-score against the last `window` finite values."""

    def __init__(self, window: int):
        if window < 4:
            raise ValueError(f"a z-score over a window of {window} values means nothing; use at least 4")
        self.window = window
        self.values: deque[float] = deque(maxlen=window)

    def score(self, value: float) -> float:
        """Deviations of `value` from the values added so far; 0.0 until a quarter of the window is filled.

        Infinite for a value that is not finite.
        """
        if len(self.values) < self.window / 4:
            return 0.0
        if not math.isfinite(value):
            return math.inf
        centre = statistics.median(self.values)
        spread = NORMAL_SCALE * statistics.median(abs(v - centre) for v in self.values)
        spread = max(spread, LEAST_RELATIVE_DEVIATION * abs(centre), math.ulp(0.0))
        return (value - centre) / spread

    def add(self, value: float) -> None:
        """Take a value into the window; one that is not finite is left out."""
        if math.isfinite(value):
            self.values.append(value)
