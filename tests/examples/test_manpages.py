"""Manual pages as prose, and their options as questions."""

from examples import manpages

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
