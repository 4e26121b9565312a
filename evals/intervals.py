"""Errors of shares: Wilson's interval of one share, and the paired difference of two models
on the same items.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Z95 = 1.959963984540054  # 95 % of a normal distribution lie within so many standard deviations


def wilson(right: int, asked: int) -> tuple[float, float]:
    """(center, half width) of Wilson's interval of 95 % of a share; unlike a binomial error it is never 0."""
    share, spread = right / asked, Z95**2 / asked
    half = Z95 / (1 + spread) * math.sqrt(share * (1 - share) / asked + spread / (4 * asked))
    return (share + spread / 2) / (1 + spread), half


def paired(a: Sequence[float], b: Sequence[float], added: float = 0.0) -> tuple[float, float]:
    """Mean of b - a over the same items and its standard error, in which what is hard for both cancels.

    added: for answers that are right (1) or wrong (0), 1 adds half an item of each outcome, as Agresti and
    Min (2005) recommend, so that few items without a difference do not look certain.
    """
    differences = [y - x for x, y in zip(a, b, strict=True)]
    total, count = math.fsum(differences), len(differences) + 2 * added
    variance = (math.fsum(d * d for d in differences) + added) / count - (total / count) ** 2
    return total / len(differences), math.sqrt(max(0.0, variance) / count)
