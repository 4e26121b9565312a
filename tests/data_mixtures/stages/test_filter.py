"""The filter stage: what stays, what is counted, and the bytes it writes."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from data_mixtures.stages import decontaminate, filter, stage
from tests.data_mixtures.stages.filtered import do_all, filtered, make_recipe, write_raw

QUESTION = "Which of the seven lakes behind the old mountain freezes first in a winter without any wind?"
GOOD = [
    f"Number {i}: a text of some length, with ümläuts, 東京 and </s>, long enough to stay here." for i in range(250)
]
BAD = [b"\xff\xfe broken" * 9, None, "", " \n\t " * 30, "short", "x" * 3000, "He asked: " + QUESTION + " Nobody knew."]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "quiz.jsonl").write_text(json.dumps({"id": 7, "question": QUESTION, "answer": "the first"}) + "\n")
    return tmp_path / "out"


def recipe_with(out: Path, **limits):
    return make_recipe(
        ["notes"], Path("none"), max_chars=2000, benchmarks={"quiz": str(out.parent / "quiz.jsonl")}, **limits
    )


def documents(done: filter.Filter, number: int = 0):
    folder, receipt = stage.result(done.out, "filter", stage.Unit("notes", number))
    return pq.read_table(folder / stage.DOCUMENTS), receipt["counts"], folder


def test_every_reason_is_counted_and_the_rest_stays_in_order(out):
    texts = [*BAD, *GOOD[:120], *BAD, *GOOD[120:]]
    done = filtered(out, {"notes": [texts]}, recipe_with(out))
    table, counts, folder = documents(done)
    assert table.column("text").to_pylist() == GOOD
    assert table.schema == filter.SCHEMA
    assert table.column("doc_id").to_pylist() == [
        xxhash.xxh3_128_intdigest(t.encode()).to_bytes(16, "big") for t in GOOD
    ]
    dropped = {"not_utf8": 2, "empty": 6, "too_short": 2, "too_long": 2, "contaminated": 2}
    assert counts["dropped"] == dropped
    assert (counts["read"], counts["kept"]) == (len(texts), len(GOOD))
    assert counts["bytes"] == sum(len(text.encode()) for text in GOOD)
    assert json.loads((folder / filter.CONTAMINATION).read_text()) == {"quiz": {"0": 2}}


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())])
def test_any_type_of_text_column_gives_the_same_bytes(out, kind, tmp_path):
    texts = [text for text in (*GOOD, *BAD) if kind == pa.string() or not isinstance(text, bytes)]
    digests = set()
    for folder, batch in ((tmp_path / "a", filter._BATCH_BYTES), (tmp_path / "b", 1000)):
        folder.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(filter, "_BATCH_BYTES", batch)
            write_raw(folder, {"notes": [texts]}, kind)
            done = filter.Filter(make_recipe(["notes"], Path("none"), max_chars=2000), folder, ("notes",))
            do_all(done)
        table, counts, place = documents(done)
        assert table.column("text").to_pylist()[: len(GOOD)] == GOOD
        assert counts["dropped"]["contaminated"] == 0
        digests.add(xxhash.xxh3_128_hexdigest((place / stage.DOCUMENTS).read_bytes()))
    assert len(digests) == 1  # batches are how it is read, not what is written


def test_what_is_done_stays_done_until_something_it_depends_on_changes(out):
    texts = {"notes": [GOOD[:10], GOOD[10:20]]}
    done = filtered(out, texts, recipe_with(out))
    assert do_all(done) == 0
    assert do_all(filter.Filter(recipe_with(out, min_chars=70), out, ("notes",))) == 2
    assert do_all(done) == 2
    write_raw(out, {"notes": [GOOD[:10], GOOD[10:19]]})
    assert do_all(done) == 1
    (out.parent / "quiz.jsonl").write_text(json.dumps({"question": "Another " + QUESTION}) + "\n")
    decontaminate.make_index(done.recipe.filter.benchmarks, out)
    assert do_all(done) == 2


def test_the_contamination_report_sums_over_units_and_outlives_the_files(out):
    texts = {"notes": [[QUESTION, *GOOD[:3]], [*GOOD[3:5], "So: " + QUESTION]], "other": [GOOD[5:7]]}
    done = filtered(out, texts, make_recipe(texts, Path("none"), benchmarks=recipe_with(out).filter.benchmarks))
    for unit in done.units():
        stage.free(out, "filter", unit)
    assert filter.contamination(out, ("notes", "other")) == {
        "quiz": {
            "items": 1,
            "searchable": 1,
            "items_found": 1,
            "documents": 2,
            "sources": {"notes": {"items_found": 1, "documents": 2}, "other": {"items_found": 0, "documents": 0}},
        }
    }


def test_a_missing_column_and_a_file_without_rows(out):
    write_raw(out, {"notes": [[], GOOD[:2]]})
    done = filter.Filter(recipe_with(out), out, ("notes",))
    with pytest.raises(ValueError, match="make the index first"):
        do_all(done)
    decontaminate.make_index(done.recipe.filter.benchmarks, out)
    do_all(done)
    assert documents(done)[0].num_rows == 0
    with pytest.raises(ValueError, match="no column 'content'; its columns: text"):
        list(filter.raw_texts(out / "fetch/notes/unit-00001" / stage.RAW, "content"))


def test_row_groups_are_cut_by_size(out, monkeypatch):
    monkeypatch.setattr(filter, "_ROW_GROUP_BYTES", 4000)
    monkeypatch.setattr(filter, "_BATCH_BYTES", 1000)
    done = filtered(out, {"notes": [GOOD]}, recipe_with(out))
    table, _, folder = documents(done)
    assert table.column("text").to_pylist() == GOOD
    assert pq.ParquetFile(folder / stage.DOCUMENTS).num_row_groups > 3
