"""Every name of a check runs what it says, old words too."""

from __future__ import annotations

import importlib.util
import runpy
import sys

import pytest

from tools.check.__main__ import main

CHECKS = [
    ("engine", "tools.check.engine", []),
    ("int8", "tools.check.engine", ["--against", "int8"]),
    ("parity", "tools.check.engine", ["--against", "published", "--prompts", "4"]),
    ("structure", "tools.check.structure", []),
    ("contained", "tools.check.contained", []),
    ("smollm2", "tests.smollm2", []),
    ("train", "tools.check.train", []),
]  # fmt: skip


def test_a_name_runs_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(runpy, "run_module", lambda module, **_: ran.append((module, sys.argv[1:])))
    for name, module, options in CHECKS:
        monkeypatch.setattr(sys, "argv", ["check", name, "tiny", "--help"])
        main()
        assert ran.pop() == (module, [*options, "tiny", "--help"])
        assert importlib.util.find_spec(module), "the module exists"


def test_an_unknown_name_is_refused_with_all_that_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["check", "strucure"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert all(known in said for known in ("'strucure'", "engine", "int8", "parity", "smollm2", "structure"))
