"""Tests of decontamination against a plain reference, on passages, near misses, boilerplate."""

import gzip
import json
import unicodedata

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_mixtures import ngrams
from data_mixtures.stages import decontaminate


def words(text: str) -> list[str]:
    """Apply the definition, letter by letter."""
    characters = [c if unicodedata.category(c)[0] in "LMN" else " " for c in text]
    return "".join(c.lower() if len(c.lower()) == 1 else c for c in characters).split(" ")


def grams(text: str, length: int) -> set[tuple[str, ...]]:
    in_order = [word for word in words(text) if word]
    return {tuple(in_order[i : i + length]) for i in range(len(in_order) - length + 1)}


def telling(gram: tuple[str, ...]) -> bool:
    return sum(sum(c.isalpha() for c in word) >= 2 for word in gram) >= 3


def holds(text: str, passage: str) -> bool:
    """Apply the rule of the first lines of `ngrams`."""
    length = min(len([word for word in words(passage) if word]), 13)
    if length < 8:
        return False
    needed = {gram for gram in grams(passage, length) if telling(gram)}
    return bool(needed) and len(needed & grams(text, length)) >= (len(needed) + 1) // 2


def index_of(*items: list[str]) -> decontaminate.Index:
    return decontaminate.Index(
        (decontaminate.Benchmark("b", len(items), len(items), {}),), *decontaminate.build(items)
    )


def find_items(index: decontaminate.Index, *texts: str) -> list[set[int]]:
    return [{number for _, number in items} for items in index.find(list(texts))]


SOME_WORDS = "one Two ÜBER 9 x don't naïve İs 東京 a1 rain, “quoted” हिन्दी"
VOCABULARY = ["\n", *SOME_WORDS.split()]
TEXT = st.lists(st.sampled_from(VOCABULARY), max_size=40).map(" ".join) | st.text(max_size=60)


@settings(max_examples=100)
@given(
    items=st.lists(st.lists(TEXT, max_size=3), max_size=4),
    texts=st.lists(TEXT, max_size=4),
    plant=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 40)), max_size=3
    ),
    window=st.sampled_from([16, 64, 1 << 16]),
)
def test_equal_to_the_reference(items, texts, plant, window):
    # parts of passages are in some texts, and texts are longer than a window
    passages = [passage for item in items for passage in item]
    for number, start, size in plant:
        if passages and texts:
            part = words(passages[number % len(passages)])[start : start + size]
            texts[number % len(texts)] += " / " + " ".join(part) + " / end"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngrams, "WINDOW_CHARS", window)
        expected = [
            {n for n, item in enumerate(items) if any(holds(text, p) for p in item)}
            for text in texts
        ]
        assert find_items(index_of(*items), *texts) == expected


def test_files_of_every_format_make_one_index_that_is_kept(tmp_path):
    question = "What is the {} that you can see behind the old station in the north of our town?"
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        for noun in ("tower", "tree"):
            arguments = [[["the quick brown fox jumps over the lazy dog every day of the week"]]]
            row = {"task_id": "x/1", "q": {"text": question.format(noun)}}
            row |= {"choices": ["a", "b"], "inputs": arguments}
            file.write(json.dumps(row) + "\n")
        file.write('\n{"q": "too short to be looked for"}\n')
    # the first and the last column have one name
    columns = [[question.format("wall").encode()], [["no", "yes"]], ["2"]]
    pq.write_table(pa.table(columns, names=["q", "c", "q"]), tmp_path / "b.parquet")
    names = {"first": str(tmp_path / "*.jsonl.gz"), "second": str(tmp_path / "b.parquet")}
    decontaminate.make_index(names, tmp_path)
    index = decontaminate.load(tmp_path, names)
    assert index is not None
    assert [(b.name, b.items, b.searchable) for b in index.benchmarks] == [
        ("first", 3, 2),
        ("second", 1, 1),
    ]
    fox = "the quick brown fox jumps over the lazy"
    texts = ["Question: " + question.format("tree"), question.format("wall"), fox]
    assert index.find([*texts, " ".join(arguments[0][0] * 3)]) == [
        [("first", 1)],
        [("second", 0)],
        [],
        [],
    ]
    # the index holds hashes, never the benchmark's text
    assert b"station" not in (tmp_path / decontaminate.INDEX).read_bytes()

    identity = decontaminate.identity(tmp_path, names)
    pq.write_table(pa.table({"q": ["another " + question]}), tmp_path / "b.parquet")
    decontaminate.make_index(names, tmp_path)
    assert decontaminate.identity(tmp_path, names) != identity
    decontaminate.make_index({}, tmp_path)
    assert decontaminate.load(tmp_path, {}) is None
    with pytest.raises(ValueError, match="make the index first"):
        decontaminate.load(tmp_path, names)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (None, b"", "matches no file. Download"),
        ("a.csv", b"a,b", "must end in .jsonl"),
        ("a.jsonl", b'{"q": "ok"}\n{broken', r"a\.jsonl:2: not JSON"),
    ],
)
def test_wrong_benchmark_files_are_named(tmp_path, file, content, message):
    if file:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        decontaminate.make_index({"mine": str(tmp_path / "a*")}, tmp_path)
    assert not (tmp_path / decontaminate.INDEX).exists()
