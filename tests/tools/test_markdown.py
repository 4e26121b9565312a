"""Markdown tables of every kind of value."""

from __future__ import annotations

from tools.markdown import table


def test_tables_show_every_kind_of_value():
    expected = "| a | b |\n| --- | ---: |\n| x | 1235 |\n| yes | 0.123 |\n| NO | - |"
    assert table(["a", "b"], [("x", 1234.6), (True, 0.1234), (False, None)]) == expected
