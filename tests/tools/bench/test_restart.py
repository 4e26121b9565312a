"""The restart benchmark: the same tokens from disk, and other tokens are no result."""

from __future__ import annotations

import json

import pytest

from tools.bench import restart
from tools.bench.__main__ import main

ARGUMENTS = ["restart", "--config", "tiny", "--dtype", "bf16", "--tokens", "200", "--threads", "1", "--json"]


@pytest.mark.rotate
def test_a_prompt_is_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    main(ARGUMENTS)
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["tokens"], row["reused"]) == (200, 199)
    assert row["bytes"] > 0


def test_other_tokens_are_no_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([([1, 2], 0.5), ([1, 3], 0.1)])
    monkeypatch.setattr(restart, "asked", lambda engine, prompt: next(answers))
    with pytest.raises(SystemExit):
        main(ARGUMENTS)
    assert "200 ids: resumed tokens [1, 3] are not the computed ones [1, 2]" in capsys.readouterr().err
