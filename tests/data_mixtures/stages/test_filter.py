"""Tests of the filter stage: what stays, what is counted, and the bytes it writes."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from data_mixtures.document_ids import shuffle_key
from data_mixtures.readers.columns import encode_origin, holds_text
from data_mixtures.stages import decontaminate, filter, stage
from tests.data_mixtures.conftest import write_lines
from tests.data_mixtures.stages.filtered import do_all, make_recipe, run_filter, write_raw

QUESTION = (
    "Which of the seven lakes behind the old mountain freezes first in a winter without any wind?"
)
SENTENCE = "a text of some length, with ümläuts, 東京 and </s>, long enough to stay here."
GOOD = [f"Number {i}: {SENTENCE}" for i in range(250)]
BAD = [
    b"\xff\xfe broken" * 9,
    None,
    "",
    " \n\t " * 30,
    "short",
    "x" * 3000,
    f"He asked: {QUESTION} So.",
]
RECIPE = make_recipe(["notes"], max_chars=2000)


@pytest.fixture
def out(tmp_path):
    write_lines(tmp_path / "quiz.jsonl", [QUESTION], "question")
    return tmp_path / "out"


def recipe_with(out: Path, sources=("notes",), **limits):
    quiz = {"quiz": str(out.parent / "quiz.jsonl")}
    return make_recipe(sources, max_chars=2000, benchmarks=quiz, **limits)


def documents(work: filter.Filter, number: int = 0):
    folder, receipt = stage.result(work.out, "filter", stage.Unit("notes", number))
    return pq.read_table(folder / stage.DOCUMENTS), receipt["counts"], folder


def column(work: filter.Filter, name: str) -> list:
    return documents(work)[0].column(name).to_pylist()


def test_every_reason_is_counted_and_the_rest_stays_in_order(out):
    texts = [*BAD, *GOOD[:120], *BAD, *GOOD[120:], f"{GOOD[9]}\0 and more\0", "\0\0"]
    work = run_filter(out, {"notes": [texts]}, recipe_with(out))
    expected = [*GOOD, f"{GOOD[9]} and more"]
    table, counts, _ = documents(work)
    assert table.column("text").to_pylist() == expected
    assert table.schema == filter.SCHEMA
    assert column(work, "doc_id") == [xxhash.xxh3_128_digest(text.encode()) for text in expected]
    dropped = {
        "not_utf8": 2,
        "empty": 7,
        "too_short": 2,
        "too_long": 2,
        "not_kept": 0,
        "contaminated": 2,
    }
    assert counts["dropped"] == dropped
    assert (counts["read"], counts["kept"]) == (len(texts), len(expected))
    assert counts["bytes"] == sum(len(text.encode()) for text in expected)
    assert counts["nuls"] == 2, "documents that had any"
    assert counts["contamination"] == {"quiz": {"documents": 2, "items": {"0": 2}}}


KINDS = [
    *(pa.string(), pa.large_string(), pa.string_view()),
    *(pa.binary(), pa.large_binary(), pa.binary_view()),
    *(pa.dictionary(pa.int32(), text_type) for text_type in (pa.string(), pa.binary())),
    pa.opaque(pa.string(), "a type", "of others"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_any_type_of_text_column_and_any_batch_give_the_same_documents(kind, tmp_path, monkeypatch):
    assert holds_text(kind)
    texts = [text for text in (*GOOD, *BAD) if kind == pa.string() or not isinstance(text, bytes)]
    monkeypatch.setattr(filter, "_BATCH_ROWS", 7)
    write_raw(tmp_path, {"notes": [texts]}, kind)
    work = filter.Filter(RECIPE, tmp_path, ("notes",))
    do_all(work)
    assert column(work, "text")[: len(GOOD)] == GOOD
    assert documents(work)[1]["dropped"]["contaminated"] == 0


def test_a_missing_column_and_a_file_without_rows(out):
    write_raw(out, {"notes": [[], GOOD[:2]]})
    work = filter.Filter(recipe_with(out), out, ("notes",))
    with pytest.raises(ValueError, match="make the index first"):
        do_all(work)
    decontaminate.make_index(work.recipe.filter.benchmarks, out)
    do_all(work)
    assert documents(work)[0].num_rows == 0
    with pytest.raises(ValueError, match="no column 'content'; its columns: text"):
        list(filter.read_raw(out / "fetch/notes/unit-00001" / stage.RAW, "content"))


def filter_parquet(out: Path, columns: dict[str, list], **entry: str) -> filter.Filter:
    """Filter a unit whose Parquet was copied as it is; `entry` is added to its plan."""
    write_raw(out, {"notes": [columns]}, **{"kind": "parquet", "text_column": "text", **entry})
    work = filter.Filter(make_recipe(["notes"], max_chars=20_000), out, ("notes",))
    do_all(work)
    return work


def test_a_document_of_a_hub_source_is_cut_too_and_says_where_it_came_from(out):
    long = "".join(f"Line number {i} of a long file.\n" for i in range(600))
    endless = "x\n" * 10_001
    assert len(long) > 3 * RECIPE.max_document_chars
    columns = {"text": [*GOOD[:9], "short", long, endless, *GOOD[9:12]], "repo": [None] * 15}
    columns |= {"url": [f"http://{i}" for i in range(15)], "score": [1.0] * 15}
    work = filter_parquet(out, columns, path="data/0.parquet")
    pieces = column(work, "text")[9:-3]
    counts = documents(work)[1]
    assert "".join(pieces) == long
    assert len(pieces) == 4
    assert max(map(len, pieces)) <= RECIPE.max_document_chars
    assert all(piece.endswith("\n") for piece in pieces)
    assert (counts["read"], counts["cut"], counts["kept"]) == (15 + 3, 3, 12 + 4)
    assert counts["dropped"]["too_long"] == counts["dropped"]["too_short"] == 1, (
        "judged before it is cut"
    )
    # row 9 is too short, 10 gives four pieces, 11 is too long
    rows = [*range(9), *[10] * 4, *range(12, 15)]
    expected = [{"file": "data/0.parquet", "row": row, "url": f"http://{row}"} for row in rows]
    assert [json.loads(origin) for origin in column(work, "origin")] == expected


def test_origins_stay_as_a_reader_says_them_and_as_far_as_they_are_utf8(out):
    columns = {"text": GOOD[:3], "origin": ["a", "b", "c"], "url": ["no"] * 3}
    assert column(filter_parquet(out, columns, kind="local"), "origin") == ["a", "b", "c"]
    urls = pa.array([b"http://a/\xff", None, b"", b"http://b"], pa.binary()).view(pa.string())
    columns = {"text": GOOD[:4], "url": urls, "id": [1, 2, 3, 4]}
    work = filter_parquet(out.with_name("other"), columns, path="0.parquet")
    origins = [json.loads(origin) for origin in column(work, "origin")]
    assert [origin.get("url") for origin in origins] == ["http://a/\ufffd", None, "", "http://b"]
    assert [origin["id"] for origin in origins] == [1, 2, 3, 4]
    encoded = json.loads(encode_origin("a.jsonl", 0, {"url": "x\ud800"}).encode())
    assert encoded == {"file": "a.jsonl", "row": 0, "url": "x?"}


def test_a_damaged_page_is_named_by_its_file(out):
    filter_parquet(out, {"text": GOOD}, path="c/0.parquet")
    raw = out / "fetch/notes/unit-00000" / stage.RAW
    # zeros over a page of the second row group: the footer stays whole
    begin = pq.ParquetFile(raw).metadata.row_group(1).column(0).dictionary_page_offset
    content = raw.read_bytes()
    raw.write_bytes(content[: begin + 100] + bytes(500) + content[begin + 600 :])
    with pytest.raises(
        ValueError, match=r"c/0\.parquet cannot be read \(.*\); restore or exclude it"
    ):
        list(filter.read_raw(raw, "text", "c/0.parquet"))


def test_a_part_of_a_source_is_what_the_shuffle_puts_first(out):
    keys = sorted(shuffle_key(xxhash.xxh3_128_digest(text.encode()), RECIPE.seed) for text in GOOD)
    for share, least, most in ((0.12, 15, 45), (0.3, 50, 100), (1.0, len(GOOD), len(GOOD))):
        recipe = replace(RECIPE, sources=(replace(RECIPE.sources[0], keep=share),))
        work = run_filter(out, {"notes": [GOOD[:130], GOOD[130:]]}, recipe)
        units = [documents(work, number) for number in (0, 1)]
        ids = [identity for table, *_ in units for identity in table.column("doc_id").to_pylist()]
        chosen = sorted(shuffle_key(identity, RECIPE.seed) for identity in ids)
        assert chosen == [key for key in keys if key < share * 2**64], (
            "a prefix of the shuffle's order"
        )
        assert sum(counts["dropped"]["not_kept"] for _, counts, _ in units) == len(GOOD) - len(
            chosen
        )
        assert least <= len(chosen) <= most
