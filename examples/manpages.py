"""Manual pages (troff with the man macros) as plain text: enough of the language for clean prose, no typesetting.

Paragraphs become single lines, headings keep their own line; conditionals, tables and macro definitions are left out.
Pages in the mdoc dialect are skipped: their macros carry words in too many ways.
"""

from __future__ import annotations

import re
import unicodedata

_ACCENTS = {"'": "\u0301", "`": "\u0300", "^": "\u0302", ":": "\u0308", "~": "\u0303", ",": "\u0327", "v": "\u030c"}
_GLYPHS = {
    "aq": "'", "dq": '"', "oq": "‘", "cq": "’", "lq": "“", "rq": "”", "Bq": "„", "Fo": "«", "Fc": "»", "em": "—",
    "en": "–", "hy": "-", "mi": "-", "bu": "•", "co": "©", "rg": "®", "ha": "^", "ti": "~", "rs": "\\", "ga": "`",
    "ss": "ß", "oa": "å", "oA": "Å", "/o": "ø", "/O": "Ø", "ae": "æ", "AE": "Æ", "-D": "Ð", "/l": "ł", "/L": "Ł",
    ".i": "ı", "at": "@", "sh": "#", "Do": "$", "Eu": "€", "->": "→", "<-": "←", ">=": "≥", "<=": "≤", "!=": "≠",
    "mu": "×", "+-": "±", "de": "°", "sc": "§", "ba": "|", "br": "|", "bv": "|", "pl": "+", "eq": "=", "*a": "α",
    "*b": "β", "la": "⟨", "ra": "⟩", "rS": "”", "Aq": "'",
}  # fmt: skip
_ESCAPE = re.compile(
    r"""\\(?:
      ["\#].*                                                                 # a comment
    | \[u(?P<hex>[0-9A-Fa-f]{4,6})\]
    | [(](?P<glyph>..) | \[(?P<long>[^\]]*)\]
    | \*(?:[(](?P<string>..)|\[(?P<longstring>[^\]]*)\]|.)
    | [fFmMn](?:[(]..|\[[^\]]*\]|.) | s[-+]?\d{0,2} | [hvwXDlLbo]'[^']*' | k.   # fonts, colours, sizes, motions
    | (?P<plain>.)
    )""",
    re.VERBOSE,
)
_PLAIN = {"e": "\\", "-": "-", "~": " ", " ": " ", "0": " ", "'": "'", "`": "`", ".": ".", "\\": "\\", "t": "\t"}
_JOINED = {"BR", "RB", "BI", "IB", "IR", "RI"}  # fonts alternate from argument to argument, without spaces
_SPACED = {"B", "I", "R", "SM", "SB"}
_BREAKS = {"PP", "P", "LP", "sp", "HP", "RS", "RE", "br", "EX", "EE", "nf", "fi", "UR", "UE", "MT", "ME"}
_SKIPPED = {"de": "..", "am": "..", "ig": "..", "TS": ".TE", "EQ": ".EN"}
_ARGUMENT = re.compile(r'"((?:[^"]|"")*)"|(\S+)')
# translated pages carry lines for their translators in this conditional, which is always true when read
_ALWAYS = re.compile(r"^[.']\s*if !'po4a'hide' ", re.MULTILINE)


def unescape(line: str) -> str:
    """One line of troff text without escapes: fonts and sizes dropped, glyph names turned into characters."""
    return _ESCAPE.sub(_replacement, line)


def _replacement(match: re.Match[str]) -> str:
    if match["hex"]:
        return chr(int(match["hex"], 16))
    name = match["glyph"] or match["long"] or match["string"] or match["longstring"]
    if not name:
        return _PLAIN.get(match["plain"] or "", "")
    if name not in _GLYPHS and len(name) == 2 and name[0] in _ACCENTS and name[1].isalpha():
        return unicodedata.normalize("NFC", name[1] + _ACCENTS[name[0]])
    return _GLYPHS.get(name, "")


def _arguments(rest: str) -> list[str]:
    return [unescape(quoted or bare) for quoted, bare in _ARGUMENT.findall(rest)]


class _Page:
    """Reads a page line by line into blocks (role, text); roles: "heading", "term", "text", "code" (lines kept)."""

    def __init__(self, source: str) -> None:
        self.blocks: list[tuple[str, str]] = []
        self._lines: list[str] = []
        self._role, self._filling, self._skip_to = "text", True, ""
        for line in _ALWAYS.sub(".", source).split("\n"):
            if self._skip_to:
                self._skip_to = "" if line.startswith(self._skip_to) else self._skip_to
            elif line[:1] in (".", "'"):
                macro, _, rest = line[1:].strip().partition(" ")
                self._macro(macro, rest)
            elif line.strip():
                self._words(unescape(line).strip() if self._filling else unescape(line).rstrip())
            else:
                self._flush()
        self._flush()

    def _words(self, line: str) -> None:
        self._lines.append(line)
        if self._role == "term":  # a term is one line; its description follows
            self._flush()

    def _flush(self) -> None:
        text = (" " if self._filling else "\n").join(self._lines).strip()
        if text:
            self.blocks.append((self._role if self._filling else "code", text))
        self._lines, self._role = [], "text"

    def _macro(self, macro: str, rest: str) -> None:
        if macro in _JOINED or macro in _SPACED:
            self._words(("" if macro in _JOINED else " ").join(_arguments(rest)))
        elif macro in _SKIPPED:
            self._skip_to = _SKIPPED[macro]
        elif macro in ("SH", "SS"):
            self._flush()
            self._filling = True
            self.blocks.append(("heading", " ".join(_arguments(rest))))
        elif macro in ("TP", "TQ"):
            self._flush()
            self._role = "term"
        elif macro == "IP":
            self._flush()
            term = (_arguments(rest) or [""])[0].strip()
            if len(term) > 1:  # a single character is a bullet
                self.blocks.append(("term", term))
        elif macro in _BREAKS:
            self._flush()
            self._filling = macro in ("fi", "EE") or (self._filling and macro not in ("nf", "EX"))


def title(source: str) -> str | None:
    """The page's name, lower case, from its .TH line; None for an alias (.so) or another dialect."""
    header = re.search(r"^\.TH +(.*)$", source, re.MULTILINE)
    names = _arguments(header[1]) if header else []
    return names[0].lower() if names else None


def page(source: str) -> str:
    """The whole page as text, or "" when it has no title."""
    if title(source) is None:
        return ""
    parts: list[str] = []
    previous = ""
    for role, text in _Page(source).blocks:
        parts += ["\n" if previous == "term" else "\n\n", text]
        previous = role
    return "".join(parts[1:])
