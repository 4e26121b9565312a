"""Manual pages as prose."""

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
