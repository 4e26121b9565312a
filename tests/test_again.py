"""What fails beside others is tried alone: a fault fails twice, a flaky test is named, many are not tried."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLAKY = """
import pathlib
def test_flaky():
    marker = pathlib.Path("tried")
    tried = marker.exists()
    marker.touch()
    assert tried
"""
FAULTS = "".join(f"def test_{i}(): assert False\n" for i in range(4))


def run(folder: Path, module: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", module], cwd=folder, env={**environment, "PYTHONPATH": str(ROOT)}, text=True,
        capture_output=True, timeout=300,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("test", "status", "last"),
    [
        (FLAKY, 0, "FLAKY, passed alone: test_it.py::test_flaky"),
        (FLAKY + "def test_fault(): assert False\n", 1, "FAILED twice: test_it.py::test_fault, test_it.py::test_flaky"),
        (FAULTS, 1, "4 tests failed; 1 to 3 would be tried again alone"),
        ("def test_right(): pass\n", 1, "0 tests failed; 1 to 3 would be tried again alone"),
    ],
)  # fmt: skip
def test_again(tmp_path: Path, test: str, status: int, last: str) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(test)
    run(tmp_path, "pytest")
    done = run(tmp_path, "tests.again")
    assert done.returncode == status, done.stdout
    assert done.stdout.splitlines()[-1] == last
