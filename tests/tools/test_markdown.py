"""Tests of Markdown tables of every kind of value."""

from __future__ import annotations

import pytest

from tools.markdown import cell, table


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x", "x"),
        (True, "yes"),
        (False, "NO"),
        (None, "-"),
        (15, "15"),
        (13.8311, "13.8"),
        (0.1234, "0.123"),
        (1234.6, "1,235"),
        (63_737, "63,737"),
        (27_840_835_584, "27.84E+9"),
        (float("inf"), "Infinity"),
    ],
)
def test_every_kind_of_value_has_a_form(value, text):
    assert cell(value) == text


def test_the_first_column_is_left_and_the_others_right():
    assert table(["a", "b"], [("x", 1)]) == "| a | b |\n| --- | ---: |\n| x | 1 |"
