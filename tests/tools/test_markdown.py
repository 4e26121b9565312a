"""Markdown tables of every kind of value."""

from __future__ import annotations

from tools.markdown import shorten, table


def test_tables_show_every_kind_of_value():
    expected = "| a | b |\n| --- | ---: |\n| x | 1235 |\n| yes | 0.123 |\n| NO | - |"
    assert table(["a", "b"], [("x", 1234.6), (True, 0.1234), (False, None)]) == expected


def test_large_numbers_are_short():
    row = {
        "days": 13.8311,
        "layers": 15,
        "fits": True,
        "gpu": "h100",
        "hours": 63_737.4,
        "bytes": 27_840_835_584,
    }
    short = {
        "days": "13.83",
        "layers": 15,
        "fits": True,
        "gpu": "h100",
        "hours": "63,737",
        "bytes": "27.84E+9",
    }
    assert shorten(row, digits=4) == short
