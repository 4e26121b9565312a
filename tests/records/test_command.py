"""Numbers with a range, and how a command ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from records.command import Count, Percent, Positive, check_ranges, run_command

ROOT = Path(__file__).resolve().parents[2]


def train(runs: Count = 1, mfu: Percent | None = None, links: tuple[Positive, ...] = ()) -> None:
    """A command with numbers."""


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"runs": 0}, "--runs 0: it should be greater than or equal to 1"),
        ({"mfu": -5.0}, "--mfu -5.0: it should be greater than 0"),
        ({"mfu": 101.0}, "--mfu 101.0: it should be less than or equal to 100"),
        ({"links": (1.0, float("inf"))}, "--links inf: it should be a finite number"),
    ],
)
def test_a_number_outside_of_its_range_is_named(values, problem):
    valid = {"runs": 3, "mfu": None, "links": (0.5,)}
    check_ranges(train, valid)
    with pytest.raises(ValueError, match=problem):
        check_ranges(train, valid | values)


@pytest.mark.parametrize(
    ("error", "status", "code", "message"),
    [
        (ValueError("no"), None, "x: no", ""),
        (OSError(28, "No space left on device", "/a"), 2, 2, "x: [Errno 28] No space left"),
        (KeyboardInterrupt(), None, 130, "x: interrupted"),
    ],
)
def test_an_error_is_one_sentence(error, status, code, message, capsys):
    def fail() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_command("x", fail, status)
    assert ended.value.code == code
    assert capsys.readouterr().err.startswith(message)


def test_a_pipe_into_head_ends_a_command_without_a_word():
    command = "import records.command as c; c.run_command('x', lambda: print('line\\n' * 10**6))"
    pipe = f'{sys.executable} -c "{command}" | head -n 1'
    outcome = subprocess.run(
        ["bash", "-o", "pipefail", "-c", pipe], cwd=ROOT, capture_output=True, text=True
    )
    assert (outcome.stdout, outcome.stderr, outcome.returncode) == ("line\n", "", 141)
