"""What rotates runs an eighth a day, all eighths make the whole, and the summary names what did not run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import tiers

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import pytest
def test_unit(): pass
@pytest.mark.rotate
@pytest.mark.parametrize("n", range(16))
def test_rotating(n): pass
"""


def run(folder: Path, *options: str, until: float = float("inf")) -> str:
    """What pytest prints of TESTS, one unit and 16 rotating ones."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(TESTS)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT), "ROTATE_UNTIL": str(until)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.tiers", *options]
    return subprocess.run(
        command, cwd=folder, env=environment, text=True, capture_output=True, timeout=300
    ).stdout


def test_the_eighths_make_the_whole_and_today_is_one_of_them() -> None:
    names = [f"tests/test_x.py::test_{i}" for i in range(200)]
    eighths = [{name for name in names if tiers.is_chosen(name, str(i))} for i in range(tiers.EIGHTHS)]
    assert set().union(*eighths) == set(names)
    assert sum(map(len, eighths)) == len(names)
    assert {name for name in names if tiers.is_chosen(name, "today")} in eighths
    assert not any(tiers.is_chosen(name, "none") for name in names)


def test_what_rotates_is_left_out_by_name(tmp_path: Path) -> None:
    assert "17 passed" in run(tmp_path)
    none = run(tmp_path, "--rotate", "none")
    assert "1 passed, 16 skipped" in none
    assert f"16 {tiers.LEFT_OUT}" in none
    assert "test_it.py 16" in none


def test_none_begins_when_the_time_is_over(tmp_path: Path) -> None:
    late = run(tmp_path, until=time.time() - 1)
    assert "1 passed, 16 skipped" in late
    assert f"16 {tiers.TOO_LATE}" in late


def test_none_begins_that_would_end_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tiers, "durations", lambda: {"long": tiers.GRACE_S + 60.0, "short": tiers.GRACE_S - 60.0}
    )
    now = 1e9
    for name, left_s, begins in (
        ("long", 70.0, True),
        ("long", 50.0, False),
        ("short", 1.0, True),
        ("short", -1.0, False),
    ):
        assert tiers.is_in_time(name, now, now + left_s) == begins, (name, left_s)
