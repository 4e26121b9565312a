"""Local inputs: which files in which order, caps, what text comes of them, and the named reasons why none does."""

import gzip
import json
from collections import Counter

import pytest

from data_mixtures.readers import local
from data_mixtures.recipe import Input

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
    prose = local.docstrings("/x/site-packages/pkg/twice.py", MODULE)
    assert prose.startswith("pkg.twice\n\nA module about doubling")
    assert "pkg.twice.double\n\nReturn twice x." in prose
    assert "Nothing else happens" in prose
    assert ">>>" not in prose
    assert "double(2)" not in prose
    with pytest.raises(local.Unreadable, match="not_python"):
        local.docstrings("x.py", "def (")


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
    with pytest.raises(local.Unreadable, match=reason):
        local.read(tmp_path / "file")


def test_gzip_and_line_ends(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"one\r\ntwo"))
    assert local.read(tmp_path / "a.gz") == "one\ntwo"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_texts_of_a_field(name, tmp_path):
    raw = "\n".join(
        [json.dumps(ROWS[0]), "", "  ", *(json.dumps(row, ensure_ascii=False) for row in ROWS[1:])]
    ).encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    assert list(local.json_texts(tmp_path / name, "text")) == ["one", "zwei ü\n", "", ""]
    assert [number for number, _ in local.json_objects(tmp_path / name)] == [1, 4, 5, 6]


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
        list(local.json_texts(path, "text"))


@pytest.mark.parametrize("damage", [lambda raw: raw[:-9], lambda raw: raw[:30] + b"\xff" * 9, lambda raw: b"no gzip"])
def test_a_broken_gzip_is_named(damage, tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(damage(gzip.compress(b'{"text": "some words of a line"}\n' * 50)))
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz is damaged or truncated"):
        list(local.json_texts(path, "text"))


@pytest.fixture
def folder(tmp_path):
    for number in range(20):
        (tmp_path / f"a/{number}.txt").parent.mkdir(exist_ok=True)
        (tmp_path / f"a/{number}.txt").write_text(f"text {number} " * 20)
    return tmp_path


def test_the_order_depends_on_names_below_a_root_alone(folder, tmp_path):
    chosen = Input("text", ("{corpus}/**/*.txt",), exclude=("*/3.txt",))
    found = local.find(chosen, {"corpus": str(folder)})
    assert len(found) == 19
    assert found != sorted(found)
    (tmp_path / "other").mkdir()
    (folder / "a").rename(tmp_path / "other/a")
    moved = local.find(chosen, {"corpus": str(tmp_path / "other")})
    assert [path.name for path in moved] == [path.name for path in found]
    assert local.portable(str(moved[0]), {"corpus": str(tmp_path / "other")}) == f"corpus/a/{moved[0].name}"
    roots = local.roots(tmp_path, tmp_path)
    assert roots["corpus"] == str(tmp_path / "corpus")
    assert local.find(Input("text", ("{stdlib}/json/*.py",)), roots)


def test_documents_are_capped_and_cleaned_and_the_rest_is_counted(folder):
    (folder / "a/0.txt").write_bytes(b"\xff")
    (folder / "a/1.txt").write_text("   ")
    (folder / "b.jsonl").write_text('{"body": "one\\ud800 two\\u0000"}\n{"body": null}\n')
    paths = sorted((folder / "a").iterdir())
    dropped = Counter[str]()
    found = list(local.documents(Input("text", ("x",)), paths, dropped))
    assert found == [path.read_text() for path in paths[2:]]
    assert dropped == {"not_utf8": 1, "no_text": 1}
    capped = list(local.documents(Input("text", ("x",), max_bytes=1000), paths, dropped))
    assert capped == found[: len(capped)]
    assert sum(map(len, capped)) <= 1000 < sum(map(len, found[: len(capped) + 1]))
    dropped.clear()
    assert list(local.documents(Input("jsonl", ("x",), field="body"), [folder / "b.jsonl"], dropped)) == ["one two"]
    assert dropped == {"no_text": 1}
