"""The filter stage: what stays, what is counted, and the bytes it writes."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from data_mixtures import shards
from data_mixtures.readers import origins
from data_mixtures.stages import decontaminate, filter, stage, word_hashes
from data_mixtures.stages.tokenize import key_of_id
from tests.data_mixtures.stages.filtered import do_all, filtered, make_recipe, write_raw

QUESTION = "Which of the seven lakes behind the old mountain freezes first in a winter without any wind?"
GOOD = [
    f"Number {i}: a text of some length, with ümläuts, 東京 and </s>, long enough to stay here."
    for i in range(250)
]
BAD = [
    b"\xff\xfe broken" * 9,
    None,
    "",
    " \n\t " * 30,
    "short",
    "x" * 3000,
    "He asked: " + QUESTION + " Nobody knew.",
]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "quiz.jsonl").write_text(
        json.dumps({"id": 7, "question": QUESTION, "answer": "the first"}) + "\n"
    )
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
    table, counts, _ = documents(done)
    assert table.column("text").to_pylist() == GOOD
    assert table.schema == filter.SCHEMA
    assert table.column("doc_id").to_pylist() == [
        xxhash.xxh3_128_intdigest(t.encode()).to_bytes(16, "big") for t in GOOD
    ]
    dropped = {"not_utf8": 2, "empty": 6, "too_short": 2, "too_long": 2, "not_kept": 0, "contaminated": 2}
    assert counts["dropped"] == dropped
    assert (counts["read"], counts["kept"]) == (len(texts), len(GOOD))
    assert counts["bytes"] == sum(len(text.encode()) for text in GOOD)
    assert counts["contamination"] == {"quiz": {"documents": 2, "items": {"0": 2}}}


def test_nul_characters_are_taken_out_and_their_documents_counted(out):
    done = filtered(out, {"notes": [[*GOOD[:9], f"{GOOD[9]}\0 and more\0", "\0\0"]]}, recipe_with(out))
    table, counts, _ = documents(done)
    assert table.column("text").to_pylist() == [*GOOD[:9], f"{GOOD[9]} and more"]
    assert (counts["nuls"], counts["dropped"]["empty"]) == (2, 1)


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())]
)
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


def test_the_counts_of_contamination_outlive_the_files(out):
    texts = {"notes": [[QUESTION, *GOOD[:3]], [*GOOD[3:5], "So: " + QUESTION]], "other": [GOOD[5:7]]}
    done = filtered(
        out, texts, make_recipe(texts, Path("none"), benchmarks=recipe_with(out).filter.benchmarks)
    )
    for unit in done.units():
        stage.free(out, "filter", unit)
    found = {
        source: [r["counts"]["contamination"] for r in stage.receipts(out, "filter", source)]
        for source in texts
    }
    assert found == {"notes": [{"quiz": {"documents": 1, "items": {"0": 1}}}] * 2, "other": [{}]}


def test_a_missing_column_and_a_file_without_rows(out):
    write_raw(out, {"notes": [[], GOOD[:2]]})
    done = filter.Filter(recipe_with(out), out, ("notes",))
    with pytest.raises(ValueError, match="make the index first"):
        do_all(done)
    decontaminate.make_index(done.recipe.filter.benchmarks, out)
    do_all(done)
    assert documents(done)[0].num_rows == 0
    with pytest.raises(ValueError, match="no column 'content'; its columns: text"):
        list(filter.read_raw(out / "fetch/notes/unit-00001" / stage.RAW, "content"))


def test_long_documents_are_cut_at_newlines_and_nothing_is_lost():
    whole = "".join(f"line {i}\n" for i in range(5000)) + "x" * 3000
    pieces = list(word_hashes.cut(whole, 1000))
    assert "".join(pieces) == whole
    assert max(map(len, pieces)) <= 1000
    assert all(piece.endswith("\n") for piece in pieces[: len(pieces) - 4])


def write_parquet(out: Path, columns: dict[str, list], entry: dict, row_group_size: int = 7) -> filter.Filter:
    """The filter of one unit that was copied as it is, done; `entry` is added to its plan."""
    texts = {"notes": [columns["text"]]}
    write_raw(out, texts)
    plan = json.loads((out / stage.PLAN).read_text())
    plan["sources"]["notes"]["units"][0] |= {"kind": "parquet", "text_column": "text", **entry}
    (out / stage.PLAN).write_text(json.dumps(plan))
    raw = out / "fetch/notes/unit-00000" / stage.RAW
    pq.write_table(pa.table(columns), raw, row_group_size=row_group_size)
    shards.write_json(
        raw.with_name(stage.RECEIPT), {"key": "", "files": {raw.name: stage._entry(raw)}, "counts": {}}
    )
    recipe = make_recipe(["notes"], Path("none"), max_chars=20_000)
    done = filter.Filter(recipe, out, ("notes",))
    do_all(done)
    return done


def test_a_document_of_a_hub_source_is_cut_too_and_says_where_it_came_from(out):
    long, endless = "".join(f"Line number {i} of a long file.\n" for i in range(600)), "x\n" * 10_001
    assert len(long) > 3 * make_recipe([], Path("none")).max_document_chars
    texts = [*GOOD[:9], "short", long, endless, *GOOD[9:12]]
    columns = {
        "text": texts,
        "url": [f"http://{i}" for i in range(15)],
        "repo": [None] * 15,
        "score": [1.0] * 15,
    }
    table, counts, _ = documents(write_parquet(out, columns, {"path": "data/0.parquet"}))
    found, origins = (table.column(name).to_pylist() for name in ("text", "origin"))
    pieces = found[9:-3]
    assert "".join(pieces) == long
    assert len(pieces) == 4
    assert (counts["read"], counts["cut"], counts["kept"]) == (15 + 3, 3, 12 + 4)
    assert counts["dropped"]["too_long"] == counts["dropped"]["too_short"] == 1, "judged before it is cut"
    rows = [*range(9), *[10] * 4, *range(12, 15)]
    assert [json.loads(each) for each in origins] == [
        {"file": "data/0.parquet", "row": row, "url": f"http://{row}"} for row in rows
    ]


def test_text_that_a_reader_wrote_keeps_the_origin_that_it_says(out):
    columns = {"text": GOOD[:3], "origin": ["a", "b", "c"], "url": ["no"] * 3}
    done = write_parquet(out, columns, {"kind": "local"})
    assert documents(done)[0].column("origin").to_pylist() == ["a", "b", "c"]


def test_an_origin_that_is_not_utf8_is_kept_as_far_as_it_is(out):
    urls = [b"http://a/\xff", None, b"", b"http://b"]
    columns = {"text": GOOD[:4], "url": pa.array(urls, pa.binary()).view(pa.string()), "id": [1, 2, 3, 4]}
    found = documents(write_parquet(out, columns, {"path": "0.parquet"}))[0].column("origin").to_pylist()
    assert [json.loads(each).get("url") for each in found] == ["http://a/\ufffd", None, "", "http://b"]
    assert [json.loads(each)["id"] for each in found] == [1, 2, 3, 4]
    assert json.loads(origins.origin("a.jsonl", 0, {"url": "x\ud800"}).encode()) == {
        "file": "a.jsonl",
        "row": 0,
        "url": "x?",
    }


def test_a_damaged_page_is_named_by_its_file(out):
    write_parquet(out, {"text": GOOD}, {"path": "c/0.parquet"}, row_group_size=100)
    raw = out / "fetch/notes/unit-00000" / stage.RAW
    begin = pq.ParquetFile(raw).metadata.row_group(1).column(0).dictionary_page_offset
    content = raw.read_bytes()
    raw.write_bytes(content[: begin + 100] + bytes(500) + content[begin + 600 :])
    with pytest.raises(ValueError, match=r"c/0\.parquet cannot be read \(.*\); restore or exclude it"):
        list(filter.read_raw(raw, "text", "c/0.parquet"))


def test_a_part_of_a_source_is_what_the_shuffle_puts_first(out):
    texts, kept = {"notes": [GOOD[:130], GOOD[130:]]}, {}
    for share in (0.12, 0.3, 1.0):
        done = make_recipe(["notes"], Path("none"))
        done = replace(done, sources=(replace(done.sources[0], keep=share),))
        work = filtered(out, texts, done)
        found = [documents(work, number) for number in (0, 1)]
        keyed = [(key_of_id(xxhash.xxh3_128_digest(t), done.seed), t) for t in map(str.encode, GOOD)]
        ids = sorted(key for table, *_ in found for key in keys_of(table, done.seed))
        assert ids == sorted(key for key, _ in keyed)[: len(ids)], "a prefix of the shuffle's order"
        assert ids == sorted(key for key, _ in keyed if key < share * 2**64)
        assert sum(counts["dropped"]["not_kept"] for _, counts, _ in found) == len(GOOD) - len(ids)
        kept[share] = len(ids)
    assert 15 <= kept[0.12] <= 45
    assert 50 <= kept[0.3] <= 100
    assert kept[1.0] == len(GOOD)


def keys_of(table: pa.Table, seed: int) -> list[int]:
    return [key_of_id(identity, seed) for identity in table.column("doc_id").to_pylist()]


def test_what_is_not_kept_costs_no_search(out, monkeypatch):
    seen, wanted, find = [], recipe_with(out), decontaminate.Index.find
    monkeypatch.setattr(
        decontaminate.Index, "find", lambda index, texts: seen.extend(texts) or find(index, texts)
    )
    done = filtered(out, {"notes": [GOOD]}, replace(wanted, sources=(replace(wanted.sources[0], keep=0.1),)))
    assert seen == documents(done)[0].column("text").to_pylist()


def test_row_groups_are_cut_by_size(out, monkeypatch):
    monkeypatch.setattr(filter, "_ROW_GROUP_BYTES", 4000)
    monkeypatch.setattr(filter, "_BATCH_BYTES", 1000)
    done = filtered(out, {"notes": [GOOD]}, recipe_with(out))
    table, _, folder = documents(done)
    assert table.column("text").to_pylist() == GOOD
    assert pq.ParquetFile(folder / stage.DOCUMENTS).num_row_groups > 3
