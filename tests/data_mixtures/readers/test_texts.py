"""Readers and generators: what text they make of small files, and that every generated equation holds."""

import gettext
import gzip
import re
import struct
from fractions import Fraction

import pytest

from data_mixtures.readers import generated, manpages, texts

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


def test_man_page_becomes_prose():
    assert manpages.page(PAGE) == (
        "NAME\n\ncp - copy files and directories\n\nOPTIONS\n\nFrançais, größer, été — it's \\ \\.\n\n"
        "-a, --archive\nsame as -dR, and preserve everything that can be preserved\n\n"
        "-f, --force\nif an existing file cannot be opened, remove it and try again\n\none\n  two"
    )
    assert manpages.page(".so man1/other.1\n") == ""


def test_man_options_become_questions():
    assert manpages.options(PAGE) == (
        "Question: What does the option -a, --archive of cp do?\n"
        "Answer: same as -dR, and preserve everything that can be preserved\n\n"
        "Question: What does the option -f, --force of cp do?\n"
        "Answer: if an existing file cannot be opened, remove it and try again"
    )


MODULE = '''"""A module about doubling, with a docstring of a hundred characters or more, because shorter
ones are left out: it doubles numbers."""


def double(x):
    """Return twice x. This sentence only makes the docstring long enough to be kept among the documentation texts.

    >>> double(2)
    4

    Nothing else happens here.
    """
'''


def test_docstrings_and_doctests_share_no_text():
    path = "/x/site-packages/pkg/twice.py"
    (prose,) = texts.read("docstrings", path, MODULE.encode(), 5000)
    assert prose.startswith("pkg.twice\n\nA module about doubling")
    assert "pkg.twice.double\n\nReturn twice x." in prose
    assert "Nothing else happens" in prose
    assert ">>>" not in prose
    assert "double(2)" not in prose
    (session,) = texts.read("doctests", path, MODULE.encode(), 5000)
    assert session.endswith("Question: What does Python print?\ndouble(2)\nAnswer:\n4\n")


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
    assert texts.read("gettext", "x.mo", raw, 5000) == ["Öffne die Datei, die in max_files geschlossen war"]


def test_metadata_and_topics():
    assert texts.read("metadata", "METADATA", b"Name: x\nVersion: 1\n\n# Title\n\nBody.\n", 5000) == [
        "# Title\n\nBody."
    ]
    assert texts.read("topics", "topics.py", b"topics = {'b': 'two', 'a': 'one'}\n", 5000) == ["one", "two"]


@pytest.mark.parametrize(
    ("kind", "raw", "reason"),
    [
        ("text", b"\xff\xfe", "not_utf8"),
        ("text", b"a\0b", "not_text"),
        ("text", gzip.compress(b"hello" * 100, mtime=0)[:20], "broken_gzip"),
        ("docstrings", b"def (", "not_python"),
        ("gettext", b"no catalog at all", "not_gettext"),
        ("gettext", b"\xde\x12\x04\x95" + b"\xff" * 16, "not_gettext"),
    ],
)
def test_unreadable_files_give_a_reason(kind, raw, reason):
    with pytest.raises(texts.Unreadable, match=reason):
        texts.read(kind, "file", raw, 5000)


def test_gzip_and_line_ends():
    assert texts.read("text", "a.gz", gzip.compress(b"one\r\ntwo"), 5000) == ["one\ntwo"]


def test_long_texts_are_cut_at_newlines_and_nothing_is_lost():
    text = "".join(f"line {i}\n" for i in range(5000)) + "x" * 3000
    pieces = list(texts.cut(text, 1000))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 1000
    assert all(piece.endswith("\n") for piece in pieces[: len(pieces) - 4])


NUMBER = r"\(?-?\d+(?:/\d+)?\)?"
SIDE = rf"{NUMBER}(?: [-+*/] {NUMBER})*"
# whole equations only: not after an operator, not before one, no variable at either end
EQUATION = re.compile(rf"(?<!\S)(?<![-+*/] )(?=({SIDE}) = ({SIDE})(?![\w/^(])(?! [-+*/] ))")


def false_equations(text: str) -> list[str]:
    """Equations between numbers in a text whose two sides differ, computed exactly."""
    wrong = []
    for sides in EQUATION.findall(text):
        left, right = (eval(re.sub(r"\d+", r"Fraction(\g<0>)", side), {"Fraction": Fraction}) for side in sides)
        if left != right:
            wrong.append(" = ".join(sides))
    return wrong


def test_generated_equations_hold():
    lessons = "\n".join(generated.generate("arithmetic", i) for i in range(400))
    lessons = re.sub(r".*\(mod.*", "", lessons)  # congruences are not equations
    assert len(EQUATION.findall(lessons)) > 5000
    assert false_equations(lessons) == []
    assert false_equations("So 12 * 3 = 37 remain, and 2 + 2 = 4.") == ["12 * 3 = 37"]  # the check can fail


def test_generated_text_depends_on_the_index_alone():
    for kind in ("arithmetic", "phrases"):
        documents = [generated.generate(kind, i) for i in range(50)]
        assert documents == [generated.generate(kind, i) for i in range(50)]
        assert len(set(documents)) == 50
        assert not any("{" in document for document in documents)
