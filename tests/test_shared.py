"""Shared folders are made once for all workers, a failure is not repeated, and a change is seen."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared import Shared

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import os
import pytest
pytestmark = pytest.mark.parametrize("number", range(4))

@pytest.fixture(scope="session")
def data(shared):
    def make(folder):
        with open("made.log", "a") as log:
            log.write("made\\n")
        if {fails}:
            raise RuntimeError("no data today")
        (folder / "file").write_text("content")
    return shared("data", make)

def test_reads(data, number):
    assert (data / "file").exists()
    if {writes} and number == 3:
        (data / "file").write_text("content")  # the same bytes: written again all the same
        (data / "new").touch()
"""


def run(folder: Path, *options: str, fails: bool = False, writes: bool = False) -> tuple[int, str, int]:
    """(exit status, output, how often the folder was made) of tests that read a shared folder."""
    (folder / "test_reads.py").write_text(TESTS.format(fails=fails, writes=writes))
    command = [sys.executable, "-m", "pytest", "-p", "tests.shared", "--basetemp", "temp", *options]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr, (folder / "made.log").read_text().count("made")


@pytest.mark.parametrize("options", [(), ("-n", "3")])
def test_made_once(tmp_path: Path, options: tuple[str, ...]) -> None:
    status, said, made = run(tmp_path, *options)
    assert (status, made) == (0, 1), said


def test_a_failure_is_reported_to_all_and_not_repeated(tmp_path: Path) -> None:
    status, said, made = run(tmp_path, "-n", "3", fails=True)
    assert (status, made) == (1, 1), said
    assert len(re.findall("ERROR at setup", said)) == 4
    assert said.count("RuntimeError: no data today") >= 4


@pytest.mark.parametrize("options", [(), ("-n", "2")])
def test_a_change_fails_the_session(tmp_path: Path, options: tuple[str, ...]) -> None:
    status, said, _ = run(tmp_path, *options, writes=True)
    assert status == 1, said
    assert "4 passed" in said
    assert "data/file was changed\ndata/new was added" in said


def test_a_half_made_folder_is_made_again(tmp_path: Path) -> None:
    """Of a worker that was killed, whose lock the system has released."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/half").touch()
    made = Shared(tmp_path)("data", lambda folder: (folder / "whole").touch())
    assert [path.name for path in made.iterdir()] == ["whole"]
