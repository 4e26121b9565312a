"""The benchmark of drafts, at toy size on real requests."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from tests.laneformer.engine.assets import fix_costs
from tests.laneformer.serve.conftest import write_model
from tools.bench import drafts
from tools.bench.drafts import Edit, Options

OLD = "".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(40))
EDIT = Edit(OLD, OLD.replace("x + 7", "x * 7").replace("x + 30", "x - 30"))


def test_an_edit_has_four_forms() -> None:
    forms = EDIT.forms()
    assert forms["whole file"] == EDIT.new
    assert forms["new lines"] == "    return x * 7\n    return x - 30\n"
    assert forms["search and replace"].count("<<<<<<< SEARCH\n") == 2
    assert "\n    return x + 7\n" in forms["search and replace"].partition("=======")[0]
    assert forms["diff"].splitlines()[0] == "--- a"


def test_edits_of_this_repository_are_found() -> None:
    found = next(drafts.edits(), None)
    if found is None:
        pytest.skip("a clone without history")
    assert found.old != found.new
    assert len(found.old) in drafts.FILE_CHARS


@pytest.mark.rotate
def test_speeds_are_measured_and_drafts_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "edits", lambda: iter([EDIT]))
    fix_costs(monkeypatch)
    model = write_model(tmp_path, max_position_embeddings=4096)
    options = Options(model=model, dtypes=("fp32",), threads=1, texts=1, tokens=120, rounds=1)
    result = drafts.measure(options, Console(quiet=True))
    rows = {row["kind"]: row for row in result["fp32"]}
    assert list(rows) == ["whole file", "search and replace", "diff", "new lines", "chat"]
    assert all(row["speed_up"] > 0 for row in rows.values())
    assert rows["whole file"]["tokens_a_pass"] > 2
    title, body = drafts.section(options, result)
    assert title == "drafts on against off"
    assert "needs a GGUF file" in body or "not installed" in body
    assert "| whole file" in body
