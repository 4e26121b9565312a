"""evals.jsonl: whole lines, added and never changed, with provenance."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from records import evals
from records.evals import (
    NO_MODEL,
    PROVENANCE,
    About,
    AboutFlags,
    EvalCommand,
    code_at_start,
    with_current_names,
)
from records.files import read_json, read_lines


def add(path: Path | None, **figures: Any) -> dict[str, Any]:
    model = {**NO_MODEL, "tokenizer_sha256": "aa", "backend": "engine"}
    return About(path, 7, 70, "p1").append("speed", figures, data_sha256=None, **model)


def test_records_are_appended_with_provenance(tmp_path, monkeypatch):
    # as if the process had started 1.5 s ago
    monkeypatch.setattr(evals, "BEGAN", time.perf_counter() - 1.5)
    path = tmp_path / "runs" / "evals.jsonl"
    first = add(path, score=0.5)
    before = path.read_bytes()
    second = add(path, score=0.6)
    assert path.read_bytes().startswith(before)
    assert read_lines(path) == [first, second]
    assert list(first) == [*PROVENANCE, "score"]
    assert first["backend"] == "engine"
    assert (first["kind"], first["step"], first["tokens_total"], first["phase"]) == (
        "speed",
        7,
        70,
        "p1",
    )
    assert abs(first["time"] - time.time()) < 60
    assert 1.5 <= first["seconds"] < 60
    assert first["code_version"]


def test_what_json_cannot_say_is_refused_and_nothing_is_written(tmp_path):
    path = tmp_path / "evals.jsonl"
    with pytest.raises(ValueError, match="NaN or infinity"):
        add(path, score=float("nan"))
    with pytest.raises(ValueError, match=r"provenance names \['step'\]"):
        add(path, step=3)
    assert add(None, score=0.5)["score"] == 0.5
    assert not list(tmp_path.iterdir())


def test_a_place_where_no_record_can_go_is_refused_before_the_evaluation(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for out in (
        tmp_path / "x.jsonl",
        tmp_path / "file",
        tmp_path / "new/folders/x.jsonl",
        Path("new.jsonl"),
    ):
        assert About(out).out == out
    for out, reason in (
        (tmp_path, "is a folder"),
        (tmp_path / "file/x.jsonl", r"cannot be written \(.*file\)"),
    ):
        with pytest.raises(ValueError, match=f"--out .* {reason}; name a file to append to"):
            About(out)
    # tests may run as root, who may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for out in (tmp_path / "file", tmp_path / "new/x.jsonl"):
        with pytest.raises(ValueError, match="cannot be written"):
            About(out)
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]


def test_the_code_is_that_of_the_start(tmp_path, monkeypatch):
    checkout = ["a" * 12]
    monkeypatch.setattr(evals, "code_version", lambda folder: checkout[-1])
    monkeypatch.setattr(sys, "argv", ["x"])
    code_at_start.cache_clear()

    def slow():
        """Somebody commits while this runs."""
        checkout.append("b" * 12)
        return add(tmp_path / "evals.jsonl", score=0.5)

    EvalCommand("slow", slow).run()
    code_at_start.cache_clear()
    assert read_json(tmp_path / "evals.jsonl")["code_version"] == "a" * 12


def measure(number: int, about: AboutFlags = About()) -> dict[str, Any] | None:  # noqa: B008
    """A made-up evaluation."""
    if number < -1:
        raise FileNotFoundError(2, "No such file or directory", "x.bin")
    if number < 0:
        raise ValueError(f"number = {number} must not be negative")
    return {"number": number, "step": about.step} if number else None


def test_a_command_prints_its_record_and_errors_in_one_line(monkeypatch, capsys):
    command = EvalCommand("measure", measure)
    for number, output in (("3", '{"number": 3, "step": 7}\n'), ("0", "")):
        monkeypatch.setattr(sys, "argv", ["x", "--number", number, *About(step=7).flags()])
        command.run()
        assert capsys.readouterr().out == output
    for number, output in (
        ("-1", "number = -1 must not be negative"),
        ("-2", ".* No such file .*: 'x.bin'"),
    ):
        monkeypatch.setattr(sys, "argv", ["x", "--number", number])
        with pytest.raises(SystemExit, match=f"^measure: {output}$"):
            command.run()
    monkeypatch.setattr(sys, "argv", ["x", "--help"])
    with pytest.raises(SystemExit):
        command.run()
    assert capsys.readouterr().out.startswith("usage: python -m evals.measure [")
    assert with_current_names({"max_per_task": 5, "kind": "core"}) == {"limit": 5, "kind": "core"}
    with pytest.raises(ValueError, match="does not evaluate a model"):
        command.check(["--number", "3"])
