"""Items that the training text held: found by the pipeline's own search, marked, and taken out of the scores."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from data_mixtures.stages import decontaminate
from evals.compare import files_of
from evals.core.__main__ import main
from evals.core.evaluate import Settings
from evals.core.prompts import asked_rows, items
from evals.core.tasks import Bundle
from evals.intervals import Z95, wilson
from evals.overlap import Overlap, clean_score
from evals.scorer import Encoder, Source
from records.evals import About
from records.items import read_items
from tests.data_mixtures.stages.filtered import filtered, make_recipe
from tests.evals.core.core_assets import write_bundle, write_laneformer
from tests.evals.test_contamination import source

PLACES = ("harbour", "market", "station", "garden", "chapel", "bridge")
ROWS = [
    {"query": f"Every morning the old keeper of the {place} walks slowly along the river and counts all boats because",
     "choices": ["he likes it", "he must"], "gold": i % 2}
    for i, place in enumerate(PLACES)
]  # fmt: skip
HELD = (1, 4)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder whose text held two of the rows, with the pipeline's own index and receipts."""
    (tmp_path / "core.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    text = "Number {}: a text of some length, long enough to stay in the training data of this test."
    texts = {
        "notes": [[*(f"They say: {ROWS[i]['query']} of it." for i in HELD), text.format(1)], [text.format(2)]]
    }
    recipe = make_recipe(texts, Path("none"), benchmarks={"core": str(tmp_path / "core.jsonl")})
    out = tmp_path / "data"
    filtered(out, texts, recipe)
    source(out, "notes", {})
    return out


def test_the_rows_that_the_text_held_are_found_in_any_form(data: Path) -> None:
    overlap = Overlap(data)
    assert overlap.contaminated(ROWS) == [i in HELD for i in range(6)]
    other = [{"question": f"Question: {row['query']}\nAnswer:", "id": i} for i, row in enumerate(ROWS)]
    assert overlap.contaminated(other) == [i in HELD for i in range(6)], "the row of another benchmark"
    assert overlap.contaminated([{"query": "too short to be found"}]) == [False]
    (data / decontaminate.INDEX).unlink()
    with pytest.raises(
        ValueError, match="was not searched for benchmarks, so which items it held is unknown"
    ):
        Overlap(data)


def test_core_says_all_and_clean(data: Path, tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle", ["copa"])
    (task,) = bundle.chosen(["copa"])[0]
    bundle.file(task).write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    model, out = tmp_path / "hf", tmp_path / "run/evals.jsonl"
    write_laneformer(model)
    asked = (model, tmp_path / "bundle", Settings(), Source(device="cpu"), About(out, 1))
    record = main(*asked, overlap=data)
    _, lines = read_items(files_of(f"{out.parent}@1", "core")[0])
    order = asked_rows(task, ROWS, "nanochat")
    assert [lines["copa", i]["contaminated"] for i in range(6)] == [ROWS.index(row) in HELD for row in order]
    clean = record["clean"]["tasks"]["copa"]
    right = [line["right"] for line in lines.values() if not line["contaminated"]]
    assert (record["clean"]["contaminated"], clean["n"], clean["score"]) == (2, 4, sum(right) / 4)
    assert record["tasks"]["copa"]["accuracy"] + clean["difference"] == pytest.approx(clean["score"])
    assert record["clean"]["core_v2"] is None, "tasks are missing"
    assert main(*asked)["clean"] is None


def test_the_order_of_rows_is_that_of_the_items(tmp_path: Path) -> None:
    """Of both protocols, with and without a subset; groups of jeopardy by category."""
    bundle, model = write_bundle(tmp_path / "bundle", ["copa", "jeopardy"]), tmp_path / "hf"
    write_laneformer(model)
    encoder = Encoder(model)
    for task in bundle.chosen(["copa", "jeopardy"])[0]:
        easy = Bundle(bundle.folder).rows(task)
        for protocol in ("nanochat", "dclm"):
            for most in (None, 3):
                if task.shots > (most or len(easy)) - 1 and protocol == "nanochat":
                    continue
                rows = asked_rows(task, easy, protocol, most)
                found = [item.prompts[-1].ids for item in items(task, easy, protocol, encoder, 128, most)]
                assert len(rows) == len(found)
                for row, ids in zip(rows, found, strict=True):
                    asked = (row.get("query") or row["context"]).strip()
                    told = row.get("continuation") or row["choices"][-1]
                    text = encoder.text_after([], ids).rstrip()
                    assert text.endswith(told)
                    assert asked in text[-len(asked) - len(told) - 12 :]


def test_the_error_of_a_clean_score_covers_what_it_should() -> None:
    """Of made-up answers whose contaminated items are easier by a known amount."""
    draw, inside = random.Random(1), 0
    for _ in range(300):
        lines = [
            {"contaminated": i % 5 == 0, "right": draw.random() < (0.8 if i % 5 == 0 else 0.5)}
            for i in range(400)
        ]
        found = clean_score(lines)
        inside += abs(found["difference"] + 0.2 * 0.3) < Z95 * found["standard_error"]
        share = sum(line["right"] for line in lines) / 400
        assert found["score"] == pytest.approx(share + found["difference"])
    # 300 draws of 95 % lie within 3 standard deviations of it
    assert abs(inside / 300 - 0.95) < 3 * math.sqrt(0.95 * 0.05 / 300)
    assert found["standard_error"] < wilson(160, 320)[1] / Z95, "what both have cancels"
    assert clean_score([{"contaminated": True, "right": True}])["score"] is None
