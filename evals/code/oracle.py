"""When a returned value is right: EvalPlus 0.3.1's rules (evalplus/eval/__init__.py, _special_oracle.py), which
tests/evals/code/test_oracle.py holds against EvalPlus itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

RTOL = 1e-07
FLOAT_ATOL = 1e-06  # where a data set gives none and floats are expected
# MBPP: what is returned cannot be stored, or any order is right
NOT_NONE = ("check_str", "text_match_three", "text_starta_endb")
AS_SETS = (
    "similar_elements",
    "find_char_long",
    "common_in_nested_lists",
    "extract_singly",
    "larg_nnum",
    "intersection_array",
    "find_dissimilar",
    "Diff",
)
# MBPP: also right, by the words of the task
ALSO_RIGHT: dict[str, Callable[[Any, list[Any], float], bool]] = {
    "are_equivalent": lambda output, arguments, atol: True,
    "sum_div": lambda output, arguments, atol: output == 0,
    "surface_Area": lambda output, arguments, atol: (
        abs(output - pyramid_surface(*arguments)) <= atol
    ),
    "digit_distance_nums": lambda output, arguments, atol: output == digit_distance(*arguments),
}


def pyramid_surface(base: float, height: float) -> int:
    """Return the surface of a square pyramid with its apex at `height` (Mbpp/581)."""
    return round(base**2 + 2 * base * math.sqrt((base / 2) ** 2 + height**2))


def digit_distance(a: int, b: int) -> int:
    """Sum the differences of digits, the shorter number filled with zeros (Mbpp/558)."""
    width = max(len(str(a)), len(str(b)))
    return sum(
        abs(int(x) - int(y)) for x, y in zip(str(a).zfill(width), str(b).zfill(width), strict=True)
    )


def are_floats(value: Any) -> bool:
    if isinstance(value, list | tuple) and value:
        return all(isinstance(item, float) for item in value)
    return isinstance(value, float)


@dataclass
class Oracle:
    """The rules for one problem, in the order of its tests."""

    dataset: str
    """ "humaneval" or "mbpp" """
    entry_point: str
    atol: float
    """0: values must be equal, but floats"""

    def right(self, output: Any, arguments: list[Any], expected: Any) -> bool:
        """Judge a value; any exception means that the values do not fit, so the answer is wrong."""
        if self.dataset == "humaneval" and self.entry_point == "find_zero":
            # EvalPlus checks it without counting its tests, so no solution passes
            return False
        # a tolerance that a test has set holds for the next
        exact = self._exactly(output, arguments, expected)
        if self.atol == 0 and are_floats(expected):
            self.atol = FLOAT_ATOL
        if exact or self.atol == 0:
            return exact
        # of one shape: NumPy would repeat the smaller one
        same_shape = type(output) is type(expected) and np.shape(output) == np.shape(expected)
        return same_shape and bool(np.allclose(output, expected, RTOL, self.atol))

    def _exactly(self, output: Any, arguments: list[Any], expected: Any) -> bool:
        if self.dataset == "mbpp" and self.entry_point in AS_SETS:
            return set(output) == set(expected)
        if self.dataset == "mbpp" and self.entry_point in NOT_NONE:
            return expected == (output if isinstance(output, bool) else output is not None)
        if bool(output == expected):
            return True
        also = ALSO_RIGHT.get(self.entry_point) if self.dataset == "mbpp" else None
        return also is not None and also(output, arguments, self.atol)
