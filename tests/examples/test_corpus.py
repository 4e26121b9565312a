"""The demo's corpus: what its readers make of small files; JSON lines that are written once."""

import itertools
from pathlib import Path

import pytest

from data_mixtures.readers.unpack import Unreadable
from examples import corpus, generated
from records.files import read_lines

MODULE = '''"""A module about doubling, with a docstring of a hundred characters or more, because shorter
ones are left out: it doubles numbers."""


def double(x):
    """Return twice x. This sentence only makes the docstring long enough to be kept among the documentation texts.

    >>> double(2)
    4

    Nothing else happens here.
    """
'''


PAGE = r"""'\" t
.de XX
junk
..
.TH "CP" "1" "2024" "GNU" "User Commands"
.SH NAME
cp \- copy files and \fBdirectories\fR
.SH OPTIONS
.PP
Fran\(,cais, gr\(:o\(sser, \[u00E9]t\('e \(em it\(aqs \\ \e.
.TP
\fB\-a\fR, \fB\-\-archive\fR
same as \-dR, and preserve everything
that can be preserved
.TP
.BR \-f , " \-\-force"
if an existing file cannot be opened, remove it and try again
.nf
one
  two
.fi
.TS
table junk
.TE
.so
"""


def write_file(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_docstrings_without_their_examples_and_doctests_without_the_prose(tmp_path):
    path = write_file(tmp_path / "site-packages/pkg/twice.py", MODULE)
    (prose,) = corpus.docstrings(path)
    assert prose.startswith("pkg.twice\n\nA module about doubling")
    assert "pkg.twice.double\n\nReturn twice x." in prose
    assert "Nothing else happens" in prose
    assert not any(part in prose for part in (">>>", "double(2)"))
    with pytest.raises(Unreadable, match="not_python"):
        corpus.docstrings(write_file(tmp_path / "broken.py", "def ("))
    (session,) = corpus.doctests(path)
    assert session.startswith("pkg.twice.double: Return twice x.")
    assert session.endswith("Question: What does Python print?\ndouble(2)\nAnswer:\n4\n")
    assert "Nothing else happens" not in session
    assert corpus.doctests(write_file(tmp_path / "plain.py", "x = 1\n")) == []


def test_man_page_becomes_prose(tmp_path):
    (text,) = corpus.man(write_file(tmp_path / "cp.1", PAGE))
    assert text == (
        "NAME\n\ncp - copy files and directories\n\nOPTIONS\n\nFrançais, größer, été — it's \\ \\.\n\n"
        "-a, --archive same as -dR, and preserve everything that can be preserved\n\n"
        "-f, --force if an existing file cannot be opened, remove it and try again\n\none\n  two"
    )
    assert corpus.man(write_file(tmp_path / "alias.1", ".so man1/other.1\n")) == []


def test_metadata_and_topics(tmp_path):
    path = write_file(tmp_path / "METADATA", "Name: x\nVersion: 1\n\n# Title\n\nBody.\n")
    assert corpus.metadata(path) == ["# Title\n\nBody."]
    topics = write_file(tmp_path / "topics.py", "topics = {'b': 'two', 'a': 'one'}\n")
    assert corpus.topics(topics) == ["one", "two"]


def test_parts_up_to_their_caps_and_no_second_writing(tmp_path):
    for number in range(9):
        write_file(
            tmp_path / f"man/{number}.1",
            f".TH P{number} 1\n.SH NAME\np{number} does this and that\n",
        )
    write_file(tmp_path / "man/broken.1", b"\xff\xfe")

    def sources():
        pages = corpus.read(corpus.man, f"{tmp_path}/man/*.1", exclude=("*/3.1",))
        return {"notes": [(pages, None), (map(generated.phrases, itertools.count()), 3000)]}

    corpus.write(tmp_path / "out", sources())
    path = tmp_path / "out/notes.jsonl"
    texts = [line["text"] for line in read_lines(path)]
    assert sorted(texts[:8]) == [f"NAME\n\np{n} does this and that" for n in range(9) if n != 3]
    assert 2000 < sum(len(text.encode()) for text in texts[8:]) <= 3000
    before = path.stat()
    corpus.write(tmp_path / "out", sources())
    assert path.stat() == before
    write_file(tmp_path / "man/9.1", ".TH P9 1\nNew.\n")
    corpus.write(tmp_path / "out", sources())
    assert path.stat() == before  # what was prepared from it stays valid
    path.unlink()
    corpus.write(tmp_path / "out", sources())
    assert "New." in path.read_text()


@pytest.mark.rotate
def test_the_demo_has_text_on_any_machine(tmp_path):
    corpus.main(tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == {"math", "multilingual", "qa", "web"}
    assert (tmp_path / "math.jsonl").stat().st_size > 3_000_000
    assert (tmp_path / "multilingual.jsonl").stat().st_size > 500_000
