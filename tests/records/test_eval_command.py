"""The shared command line: the record is the last line of stdout, user errors are one line."""

from __future__ import annotations

import json
import sys

import pytest

from records.evals import EvalCommand


def main(number: int) -> dict[str, int] | None:
    if number < 0:
        raise ValueError(f"number = {number} must not be negative")
    return {"number": number} if number else None


def test_the_record_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--number", "3"])
    EvalCommand("count", main).run()
    assert json.loads(capsys.readouterr().out) == {"number": 3}
    monkeypatch.setattr(sys, "argv", ["x", "--number", "0"])
    EvalCommand("count", main).run()
    assert capsys.readouterr().out == ""


def test_a_user_error_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--number", "-1"])
    with pytest.raises(SystemExit, match=r"^count: number = -1 must not be negative$"):
        EvalCommand("count", main).run()
