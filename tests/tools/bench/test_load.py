"""The load benchmark on a small model: every start and read is timed, and nothing stays in the page cache unasked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.laneformer.engine.assets import random_model, small_config, write_folder
from tools.bench.__main__ import main


def test_a_first_start_and_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    folder = write_folder(tmp_path / "hf", random_model(small_config(), dtype="bf16"))
    main(
        ["load", str(folder), "--rounds", "2", "--threads", "1", "--json", "--out", str(tmp_path / "page.md")]
    )
    found = json.loads(capsys.readouterr().out)
    assert len(found["rounds"]) == 2
    assert all(seconds > 0 for each in found["rounds"] for seconds in each.values())
    assert found["own_bytes"] == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert "| first, from the disk |" in (tmp_path / "page.md").read_text()
    assert len(list((folder / ".packed").glob("*.bin"))) == 1, "first starts keep nothing"
