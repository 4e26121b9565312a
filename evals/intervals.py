"""Wilson's interval of a share."""

from __future__ import annotations

import math

Z95 = 1.959963984540054  # 95 % of a normal distribution lie within so many standard deviations


def wilson(right: float, total: int) -> tuple[float, float]:
    """Return (center, half width) of Wilson's interval of 95 % of right / total."""
    share = right / total
    spread = Z95**2 / total
    # unlike a binomial error it is never 0
    half = Z95 / (1 + spread) * math.sqrt(share * (1 - share) / total + spread / (4 * total))
    return (share + spread / 2) / (1 + spread), half
