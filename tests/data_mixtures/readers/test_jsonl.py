"""JSON lines: text by field, plain or gzipped; wrong files are refused by line."""

import gzip
import json

import pytest

from data_mixtures.readers import jsonl

ROWS = [{"text": "one", "id": 1}, {"id": 2, "text": "zwei ü\n"}, {"text": None}, {"text": "", "body": "x"}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_texts_of_a_field(name, tmp_path):
    raw = "\n".join(
        [json.dumps(ROWS[0]), "", "  ", *(json.dumps(row, ensure_ascii=False) for row in ROWS[1:])]
    ).encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    assert list(jsonl.texts(tmp_path / name, "text")) == ["one", "zwei ü\n", "", ""]
    assert [number for number, _ in jsonl.objects(tmp_path / name)] == [1, 4, 5, 6]


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
        list(jsonl.texts(path, "text"))


@pytest.mark.parametrize("damage", [lambda raw: raw[:-9], lambda raw: raw[:30] + b"\xff" * 9, lambda raw: b"no gzip"])
def test_a_broken_gzip_is_named(damage, tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(damage(gzip.compress(b'{"text": "some words of a line"}\n' * 50)))
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz is damaged or truncated"):
        list(jsonl.texts(path, "text"))
