"""The page of the CUDA engine's model says what it is; test_fluid.py and test_timeline.py hold the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench import cuda_model
from tools.bench.__main__ import main


@pytest.mark.rotate
def test_shares_are_of_the_datasheet_and_of_what_reads_reach() -> None:
    found = cuda_model.modelled("central", flavor="300m")
    assert found["percent_of_datasheet"] == pytest.approx(0.9 * found["percent_of_probe"], abs=1e-5)
    assert found["exposed_us_per_layer"] > 0


@pytest.mark.rotate
def test_the_page_says_that_it_is_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"tokens_per_s": 900.0, "percent_of_probe": 90.0, "percent_of_datasheet": 80.0}
    monkeypatch.setattr(
        cuda_model, "modelled", lambda case, **options: figures | {"exposed_us_per_layer": 2.0}
    )
    main(["cuda-model", "--json", "--out", str(tmp_path / "page.md")])
    result = json.loads(capsys.readouterr().out)
    assert result["model"] is True
    page = (tmp_path / "page.md").read_text()
    assert "Nothing here was measured" in page
    assert "not a measurement" in page
    assert page.count("| tokens per s |") == len(result["tables"]) == 5
    assert "| B200 | pessimistic | 900 | 90 | 80 | 2 |" in page
    assert "| decode.issue_bytes_per_clock | 54.3 | bytes, one multiprocessor | counted |" in page
