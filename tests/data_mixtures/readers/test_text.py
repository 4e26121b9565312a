"""Text files and docstrings: what text comes of them, and the named reasons why none does."""

import gzip

import pytest

from data_mixtures.readers import text

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
