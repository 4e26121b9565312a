"""Tests that an eighth rotates each day, all eighths make the whole, skips are named."""

from __future__ import annotations

import time

import pytest

from tests import tiers

TESTS = """
import pytest
def test_unit(): pass
@pytest.mark.rotate
@pytest.mark.parametrize("n", range(16))
def test_rotating(n): pass
"""


def test_the_eighths_make_the_whole_and_today_is_one_of_them():
    names = [f"tests/test_x.py::test_{i}" for i in range(200)]
    eighths = [
        {name for name in names if tiers.is_chosen(name, str(i))} for i in range(tiers.EIGHTHS)
    ]
    assert set().union(*eighths) == set(names)
    assert sum(map(len, eighths)) == len(names)
    assert {name for name in names if tiers.is_chosen(name, "today")} in eighths
    assert not any(tiers.is_chosen(name, "none") for name in names)


@pytest.mark.parametrize(
    ("options", "left_s", "reason"),
    [((), 60, None), (("--rotate", "none"), 60, tiers.LEFT_OUT), ((), -1, tiers.TOO_LATE)],
)
def test_what_does_not_run_is_named(pytester, monkeypatch, options, left_s, reason):
    monkeypatch.setenv("ROTATE_UNTIL", str(time.time() + left_s))
    pytester.makepyfile(test_it=TESTS)
    outcome = pytester.runpytest_subprocess("-p", "tests.tiers", *options)
    outcome.assert_outcomes(passed=1 if reason else 17, skipped=16 if reason else 0)
    if reason:
        outcome.stdout.fnmatch_lines([f"*16 {reason}*", "test_it.py 16"])


@pytest.mark.parametrize(
    ("name", "left_s", "begins"),
    [("long", 70.0, True), ("long", 50.0, False), ("short", 1.0, True), ("short", -1.0, False)],
)
def test_none_begins_that_would_end_too_late(monkeypatch, name, left_s, begins):
    seconds = {"long": tiers.GRACE_S + 60.0, "short": tiers.GRACE_S - 60.0}
    monkeypatch.setattr(tiers, "durations", lambda: seconds)
    assert tiers.is_in_time(name, 1e9, 1e9 + left_s) == begins
