"""The longest groups start first and what rotates last; tests that share a module's fixture stay together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests import schedule

ROOT = Path(__file__).resolve().parents[1]
SHORT = "def test_a(): pass\ndef test_b(): pass\ndef test_c(): pass\n"
LONG = """
import pytest
@pytest.fixture(scope="module")
def made(): return 1
@pytest.mark.proof
def test_proved(): pass
def test_alone(): pass
def test_one(made): pass
def test_two(made): pass
@pytest.mark.parametrize("x", ["with ] and @"])
def test_last(x): pass
"""
DURATIONS = {
    "test_long.py::test_alone": 50, "test_long.py::test_one": 40, "test_long.py::test_last[with ] and @]": 200,
    "test_long.py::test_proved": 300, "test_short.py::test_a": 1,
}  # fmt: skip
PLUGIN = "import pathlib\nfrom tests import schedule\nschedule.DURATIONS = pathlib.Path('durations.json')\n"


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(PLUGIN)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n proof: one\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "tests.schedule",
        "-p",
        "tests.tiers",
        "--basetemp",
        "temp",
        *options,
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    return subprocess.run(
        [*command, "--dist", "loadgroup", "--no-loadscope-reorder"], cwd=folder, text=True,
        env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, timeout=300,
    )  # fmt: skip


def test_the_longest_group_starts_first(tmp_path: Path) -> None:
    (tmp_path / "test_a_short.py").write_text(SHORT)
    (tmp_path / "test_long.py").write_text(LONG)
    (tmp_path / "durations.json").write_text(json.dumps(DURATIONS))
    done = run(tmp_path, "-n", "1")
    ran = [line.split("PASSED ")[1].strip() for line in done.stdout.splitlines() if "PASSED " in line]
    assert ran == [
        "test_long.py::test_last[with ] and @]",
        "test_long.py::test_alone",
        "test_long.py::test_one",
        "test_long.py::test_two",
        *(f"test_a_short.py::test_{name}" for name in "abc"),
        "test_long.py::test_proved",
    ], done.stdout + done.stderr
    (groups,) = (json.loads(path.read_text()) for path in tmp_path.glob("temp/popen-*/groups.json"))
    assert list(groups.values()).count("test_long.py") == 2, "those that share a module's fixture"
    assert len(set(groups.values())) == 5


def test_a_group_runs_in_one_worker(tmp_path: Path) -> None:
    """Also with as many workers as groups, where xdist without the groups would spread the tests."""
    for name in "xy":
        note = 'def test_(n): open(f"{__file__}.log", "a").write(os.environ["PYTEST_XDIST_WORKER"] + " ")'
        mark = "import os, pytest\n@pytest.mark.parametrize('n', range(6))\n"
        (tmp_path / f"test_{name}.py").write_text(mark + note)
    (tmp_path / "durations.json").write_text("{}")
    done = run(tmp_path, "-n", "2")
    logs = [(tmp_path / f"test_{name}.py.log").read_text().split() for name in "xy"]
    assert [(len(log), len(set(log))) for log in logs] == [(6, 1)] * 2, done.stdout + done.stderr


def test_measured_times_replace_known_ones() -> None:
    known = {"kept": 3.0, "skipped": 4.0, "faster": 9.0}
    measured = {"skipped": 0.1, "faster": 0.2, "new": 5.04}
    assert json.loads(schedule.merged(known, measured, {"skipped"})) == {
        "kept": 3.0,
        "new": 5.0,
        "skipped": 4.0,
    }


def test_listed_tests_have_files() -> None:
    """A file that was renamed takes its durations along."""
    files = {name.split("::")[0] for name in json.loads(schedule.DURATIONS.read_text())}
    assert not [file for file in files if not (ROOT / file).is_file()]
