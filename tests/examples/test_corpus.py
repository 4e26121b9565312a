"""The demo's corpus: what its readers make of small files; JSON lines that are not written again unchanged."""

import gettext
import itertools
import json
import struct
from pathlib import Path

import pytest

from data_mixtures.readers.text import Unreadable
from examples import corpus, generated

MODULE = '''"""A module about doubling, with a docstring of a hundred characters or more, because shorter
ones are left out: it doubles numbers."""


def double(x):
    """Return twice x. This sentence only makes the docstring long enough to be kept among the documentation texts.

    >>> double(2)
    4

    Nothing else happens here.
    """
'''


def written(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_doctests_are_questions_without_the_prose(tmp_path):
    path = written(tmp_path / "site-packages/pkg/twice.py", MODULE)
    (session,) = corpus.doctests(path)
    assert session.startswith("pkg.twice.double: Return twice x.")
    assert session.endswith("Question: What does Python print?\ndouble(2)\nAnswer:\n4\n")
    assert "Nothing else happens" not in session
    assert corpus.doctests(written(tmp_path / "plain.py", "x = 1\n")) == []


def mo_file(messages: dict[str, str], order: str) -> bytes:
    header = {"": "Content-Type: text/plain; charset=UTF-8\n"}
    pairs = sorted({**header, **messages}.items())
    strings = [key.encode() for key, _ in pairs] + [value.encode() for _, value in pairs]
    at, table = 28 + 8 * len(strings), b""
    for string in strings:
        table += struct.pack(order + "2I", len(string), at)
        at += len(string) + 1
    head = struct.pack(order + "7I", 0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, 0)
    return head + table + b"".join(string + b"\0" for string in strings)


@pytest.mark.parametrize("order", ["<", ">"])
def test_gettext_catalog(order, tmp_path):
    messages = {
        "_Open the file that was closed": "Öffne die _Datei, die in max_files geschlossen war",
        "%d file was deleted\0%d files were deleted": "%d Datei wurde gelöscht\0%d Dateien wurden gelöscht",
        "OK": "Gut",
        "An untranslated message of some length": "An untranslated message of some length",
    }
    raw = mo_file(messages, order)
    (tmp_path / "x.mo").write_bytes(raw)
    with (tmp_path / "x.mo").open("rb") as file:  # the standard library agrees that this is a catalog
        assert gettext.GNUTranslations(file).gettext("OK") == "Gut"
    # out: short messages ("%d Datei wurde gelöscht" has 23 characters) and untranslated ones; the mnemonic is gone
    assert corpus.gettext(tmp_path / "x.mo") == ["Öffne die Datei, die in max_files geschlossen war"]


def test_metadata_and_topics(tmp_path):
    path = written(tmp_path / "METADATA", "Name: x\nVersion: 1\n\n# Title\n\nBody.\n")
    assert corpus.metadata(path) == ["# Title\n\nBody."]
    assert corpus.topics(written(tmp_path / "topics.py", "topics = {'b': 'two', 'a': 'one'}\n")) == ["one", "two"]


@pytest.mark.parametrize("raw", [b"no catalog at all", b"\xde\x12\x04\x95" + b"\xff" * 16])
def test_a_file_that_is_no_catalog_is_named_as_such(raw, tmp_path):
    with pytest.raises(Unreadable, match="not_gettext"):
        corpus.gettext(written(tmp_path / "x.mo", raw))


def test_parts_up_to_their_caps_and_no_second_writing(tmp_path):
    for number in range(9):
        written(tmp_path / f"man/{number}.1", f".TH P{number} 1\n.SH NAME\np{number} does this and that\n")
    written(tmp_path / "man/broken.1", b"\xff\xfe")

    def sources():
        pages = corpus.read(corpus.man, f"{tmp_path}/man/*.1", exclude=("*/3.1",))
        return {"notes": [(pages, None), (map(generated.phrases, itertools.count()), 3000)]}

    corpus.write(tmp_path / "out", sources())
    path = tmp_path / "out/notes.jsonl"
    found = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    assert sorted(found[:8]) == [f"NAME\n\np{n} does this and that" for n in range(9) if n != 3]
    assert 2000 < sum(len(text.encode()) for text in found[8:]) <= 3000
    before = path.stat()
    corpus.write(tmp_path / "out", sources())
    assert path.stat() == before
    written(tmp_path / "man/9.1", ".TH P9 1\nNew.\n")
    corpus.write(tmp_path / "out", sources())
    assert path.stat() != before


def test_the_demo_has_text_on_any_machine(tmp_path):
    corpus.main(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "math.jsonl",
        "multilingual.jsonl",
        "qa.jsonl",
        "web.jsonl",
    ]
    assert (tmp_path / "math.jsonl").stat().st_size > 3_000_000
    assert (tmp_path / "multilingual.jsonl").stat().st_size > 500_000
