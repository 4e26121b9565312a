"""Text files, JSON lines and docstrings: what text comes of them, and the named reasons why none does."""

import gzip
import json

import pytest

from data_mixtures.readers import text

ROWS = [{"text": "one", "id": 1}, {"id": 2, "text": "zwei ü\n"}, {"text": None}, {"text": "", "body": "x"}]
MODULE = '''"""A module about doubling, with a docstring of a hundred characters or more, because shorter
ones are left out: it doubles numbers."""


def double(x):
    """Return twice x. This sentence only makes the docstring long enough to be kept among the documentation texts.

    >>> double(2)
    4

    Nothing else happens here.
    """
'''


def test_docstrings_without_their_examples():
    prose = text.docstrings("/x/site-packages/pkg/twice.py", MODULE)
    assert prose.startswith("pkg.twice\n\nA module about doubling")
    assert "pkg.twice.double\n\nReturn twice x." in prose
    assert "Nothing else happens" in prose
    assert ">>>" not in prose
    assert "double(2)" not in prose
    with pytest.raises(text.Unreadable, match="not_python"):
        text.docstrings("x.py", "def (")


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"\xff\xfe", "not_utf8"),
        (b"a\0b", "not_text"),
        (gzip.compress(b"hello" * 100, mtime=0)[:20], "broken_gzip"),
        (gzip.compress(b"hello" * 100, mtime=0)[:12] + b"\xff" * 30, "broken_gzip"),
    ],
)
def test_unreadable_files_give_a_reason(raw, reason, tmp_path):
    (tmp_path / "file").write_bytes(raw)
    with pytest.raises(text.Unreadable, match=reason):
        text.read(tmp_path / "file")


def test_gzip_and_line_ends(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"one\r\ntwo"))
    assert text.read(tmp_path / "a.gz") == "one\ntwo"


def test_long_texts_are_cut_at_newlines_and_nothing_is_lost():
    whole = "".join(f"line {i}\n" for i in range(5000)) + "x" * 3000
    pieces = list(text.cut(whole, 1000))
    assert "".join(pieces) == whole
    assert max(map(len, pieces)) <= 1000
    assert all(piece.endswith("\n") for piece in pieces[: len(pieces) - 4])


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_texts_of_a_field(name, tmp_path):
    raw = "\n".join(
        [json.dumps(ROWS[0]), "", "  ", *(json.dumps(row, ensure_ascii=False) for row in ROWS[1:])]
    ).encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    assert list(text.json_texts(tmp_path / name, "text")) == ["one", "zwei ü\n", "", ""]
    assert [number for number, _ in text.json_objects(tmp_path / name)] == [1, 4, 5, 6]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', r"a\.jsonl:2: not JSON"),
        ('{"content": "x", "id": 3}', r"a\.jsonl:2: has no 'text'; its fields: content, id\. Set `field`"),
        ('["x"]', r":2: has no 'text'; it is list"),
        ('{"text": 3}', r":2: 'text' is int, it must be a string"),
        (b'"\xff"', r":2: not JSON"),
    ],
)
def test_a_wrong_line_is_named(line, message, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(ValueError, match=message):
        list(text.json_texts(path, "text"))


@pytest.mark.parametrize("damage", [lambda raw: raw[:-9], lambda raw: raw[:30] + b"\xff" * 9, lambda raw: b"no gzip"])
def test_a_broken_gzip_is_named(damage, tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(damage(gzip.compress(b'{"text": "some words of a line"}\n' * 50)))
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz is damaged or truncated"):
        list(text.json_texts(path, "text"))
