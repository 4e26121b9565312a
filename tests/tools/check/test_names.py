"""Every name of a check runs its module, which can be run."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tools.check.__main__ import CHECKS, main

ROOT = Path(__file__).resolve().parents[3]


def test_a_name_runs_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(runpy, "run_module", lambda module, **_: calls.append((module, sys.argv[1:])))
    for name in CHECKS:
        monkeypatch.setattr(sys, "argv", ["check", name, "tiny", "--help"])
        main()
        assert calls.pop() == (f"tools.check.{name}", ["tiny", "--help"])
        assert 'if __name__ == "__main__":' in (ROOT / f"tools/check/{name}.py").read_text()


def test_an_unknown_name_is_refused_with_all_that_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["check", "strucure"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert all(name in message for name in ("'strucure'", *CHECKS))
