"""Tests that the longest groups start first, rotating ones last, and module fixtures group."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import schedule

ROOT = Path(__file__).resolve().parents[1]
SHORT = "def test_a(): pass\ndef test_b(): pass\ndef test_c(): pass\n"
LONG = """
import pytest
@pytest.fixture(scope="module")
def number(): return 1
@pytest.mark.proof
def test_proved(): pass
def test_alone(): pass
def test_one(number): pass
def test_two(number): pass
@pytest.mark.parametrize("x", ["with ] and @"])
def test_last(x): pass
"""
WORKER = """
import os, pytest
@pytest.mark.parametrize("n", range(6))
def test_(n): open(f"{__file__}.log", "a").write(os.environ["PYTEST_XDIST_WORKER"] + " ")
"""
DURATIONS = {
    "test_long.py::test_alone": 50,
    "test_long.py::test_one": 40,
    "test_long.py::test_last[with ] and @]": 200,
    "test_long.py::test_proved": 300,
    "test_short.py::test_a": 1,
}
PLUGIN = "import pathlib\nfrom tests import schedule\nschedule.DURATIONS = pathlib.Path('durations.json')\n"


@pytest.fixture(autouse=True)
def no_deadline(monkeypatch):
    # of this run, which the runs inside these tests would inherit
    monkeypatch.delenv("ROTATE_UNTIL", raising=False)


def run(pytester, workers, durations, **files):
    pytester.makeconftest(PLUGIN)
    pytester.makeini("[pytest]\nmarkers =\n proof: one\n")
    pytester.makepyfile(**files)
    (pytester.path / "durations.json").write_text(json.dumps(durations))
    options = (
        f"-v -p tests.schedule -p tests.tiers --dist loadgroup --no-loadscope-reorder -n {workers}"
    )
    return pytester.runpytest_subprocess(*options.split())


def test_the_longest_group_starts_first(pytester):
    outcome = run(pytester, 1, DURATIONS, test_a_short=SHORT, test_long=LONG)
    ran = [line.split("PASSED ")[1].strip() for line in outcome.outlines if "PASSED " in line]
    assert ran == [
        "test_long.py::test_last[with ] and @]",
        "test_long.py::test_alone",
        "test_long.py::test_one",
        "test_long.py::test_two",
        *(f"test_a_short.py::test_{name}" for name in "abc"),
        "test_long.py::test_proved",
    ]
    (path,) = pytester.path.rglob("groups.json")
    groups = json.loads(path.read_text())
    assert list(groups.values()).count("test_long.py") == 2, "those that share a module's fixture"
    assert len(set(groups.values())) == 5


def test_a_group_runs_in_one_worker(pytester):
    # even with as many workers as groups, where xdist alone would spread the tests
    run(pytester, 2, {}, test_x=WORKER, test_y=WORKER)
    logs = [(pytester.path / f"test_{name}.py.log").read_text().split() for name in "xy"]
    assert [(len(log), len(set(log))) for log in logs] == [(6, 1)] * 2


def test_measured_times_replace_listed_ones():
    listed = {"kept": 3.0, "skipped": 4.0, "faster": 9.0}
    merged = schedule.merge_durations(
        listed, {"skipped": 0.1, "faster": 0.2, "new": 5.04}, {"skipped"}
    )
    assert json.loads(merged) == {"kept": 3.0, "new": 5.0, "skipped": 4.0}


def test_listed_tests_have_files():
    # a renamed file takes its durations along
    files = {name.split("::")[0] for name in json.loads(schedule.DURATIONS.read_text())}
    assert not [file for file in files if not (ROOT / file).is_file()]
