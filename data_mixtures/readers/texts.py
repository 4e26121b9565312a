"""Readers: the bytes of one file on this machine -> documents of text. Pure functions, so they can run anywhere.

Nothing is guessed: a file that is not UTF-8, or that a reader cannot parse, gives a named reason, which is counted in
the manifest.
"""

from __future__ import annotations

import ast
import doctest
import email.parser
import email.policy
import gzip
import re
import struct
from collections.abc import Iterator
from pathlib import PurePath

from data_mixtures.readers import manpages

_MIN_MESSAGE_CHARS = 24  # shorter ones are labels of buttons
_CATALOG_CHARS = 4_000  # a gettext catalog is cut into documents of about this size
_Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Unreadable(Exception):
    """A file that gives no text; the message is the reason that the manifest counts."""


def read(kind: str, path: str, raw: bytes, max_chars: int) -> list[str]:
    """All documents of one file, cut at newlines to at most max_chars. Unreadable when it is not of this kind."""
    raw = _decompressed(raw)
    texts = _catalog(raw) if kind == "gettext" else _TEXT_READERS[kind](path, _utf8(raw))
    # string literals can hold what UTF-8 cannot (lone surrogates) and what text should not (NUL)
    clean = [text.encode(errors="ignore").decode().replace("\0", "") for text in texts]
    return [piece for text in clean for piece in cut(text, max_chars)]


def _decompressed(raw: bytes) -> bytes:
    try:
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError) as error:
        raise Unreadable("broken_gzip") from error


def _utf8(raw: bytes) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable("not_utf8") from error
    if "\0" in text:
        raise Unreadable("not_text")
    return text.replace("\r\n", "\n")


def cut(text: str, max_chars: int) -> Iterator[str]:
    """The text in pieces of at most max_chars, cut after newlines (or anywhere, in a line that is longer)."""
    start = 0
    while len(text) - start > max_chars:
        newline = text.rfind("\n", start, start + max_chars)
        end = newline + 1 if newline > start else start + max_chars
        yield text[start:end]
        start = end
    yield text[start:]


def _text(path: str, text: str) -> list[str]:
    return [text]


def _definitions(text: str, path: str) -> Iterator[tuple[str, str]]:
    # (dotted name, docstring) in file order; only definitions are visited, which is much faster than ast.walk
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unreadable("not_python") from error
    stack: list[tuple[str, _Definition]] = [(_module_name(path), tree)]
    while stack:
        name, node = stack.pop()
        docstring = ast.get_docstring(node)
        if docstring:
            yield name, docstring
        inner = [child for child in node.body if isinstance(child, _Definition)]
        stack.extend((f"{name}.{child.name}", child) for child in reversed(inner))


def _module_name(path: str) -> str:
    parts = PurePath(path).with_suffix("").parts
    root = max((i for i, part in enumerate(parts) if part in ("site-packages", "dist-packages")), default=-1)
    return ".".join(part for part in parts[root + 1 :] if part not in ("__init__", "/"))


def _docstrings(path: str, text: str) -> list[str]:
    """A module's documentation as one text: names and docstrings, without the examples (those are `doctests`)."""
    entries = []
    for name, docstring in _definitions(text, path):
        prose = re.sub(r"\n{3,}", "\n\n", _without_examples(docstring)).strip()
        if len(prose) >= 100:
            entries.append(f"{name}\n\n{prose}")
    return ["\n\n".join(entries)]


def _without_examples(docstring: str) -> str:
    kept, inside = [], False
    for line in docstring.split("\n"):
        inside = line.lstrip().startswith(">>>") or (inside and bool(line.strip()))
        if not inside:
            kept.append(line)
    # the headings of sections that held nothing else
    return re.sub(r"^[ \t]*Examples?:*[ \t]*\n([ \t]*[=-]{3,}[ \t]*\n)?", "", "\n".join(kept), flags=re.MULTILINE)


def _doctests(path: str, text: str) -> list[str]:
    """One text per docstring with examples: what it is about, then input as question and output as answer."""
    if ">>>" not in text:  # parsing is the expensive part
        return []
    texts = []
    for name, docstring in _definitions(text, path):
        if ">>>" not in docstring:
            continue
        try:
            examples = doctest.DocTestParser().get_examples(docstring)
        except ValueError:
            continue  # one malformed docstring says nothing about the others of its file
        session = _session(examples)
        if session:
            about = " ".join(docstring.split("\n\n")[0].split())
            texts.append(f"{name}: {about}\n\n{session}" if not about.startswith(">>>") else f"{name}\n\n{session}")
    return texts


def _session(examples: list[doctest.Example]) -> str:
    parts, pending = [], ""
    for example in examples:
        pending += example.source
        if example.want:
            parts.append(f"Question: What does Python print?\n{pending}Answer:\n{example.want}")
            pending = ""
    return "\n".join(parts)


def _metadata(path: str, text: str) -> list[str]:
    """The long description of an installed package."""
    message = email.parser.Parser(policy=email.policy.compat32).parsestr(text)
    body = message.get_payload() or message.get("Description") or ""
    return [str(body).strip()]


def _topics(path: str, text: str) -> list[str]:
    """The Python reference manual as `help()` holds it: one string per topic."""
    try:
        topics = [node.value for node in ast.parse(text).body if isinstance(node, ast.Assign)]
        values = ast.literal_eval(topics[0])
    except (SyntaxError, ValueError, IndexError) as error:
        raise Unreadable("not_python") from error
    return [values[name] for name in sorted(values)]


def _man(path: str, text: str) -> list[str]:
    return [manpages.page(text)]


def _man_options(path: str, text: str) -> list[str]:
    return [manpages.options(text)]


def _catalog(raw: bytes) -> list[str]:
    """The translations of a gettext .mo file, long messages only, in documents of some thousand characters."""
    try:
        pairs = list(_messages(raw))
    except (struct.error, UnicodeDecodeError, LookupError) as error:
        raise Unreadable("not_gettext") from error
    documents: list[list[str]] = [[]]
    size = 0
    for original, translation in pairs:
        if translation == original or len(translation) < _MIN_MESSAGE_CHARS:
            continue
        if size > _CATALOG_CHARS:
            documents.append([])
            size = 0
        documents[-1].append(re.sub(r"(?<!\w)[&_](?=\w)|\r", "", translation).strip("\n"))  # without keyboard mnemonics
        size += len(translation)
    return ["\n".join(messages) for messages in documents]


def _messages(raw: bytes) -> Iterator[tuple[str, str]]:
    # layout: magic, version, count, offset of the originals' table, offset of the translations' table; a table holds
    # (length, offset) pairs; the translation of "" is the header; plural forms follow each other after NULs
    order = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}.get(raw[:4])
    if order is None:
        raise Unreadable("not_gettext")
    count, *tables = struct.unpack_from(order + "3I", raw, 8)
    entries = [[struct.unpack_from(order + "2I", raw, at + 8 * i) for i in range(count)] for at in tables]
    charset = "utf-8"
    for pair in zip(*entries, strict=True):
        original, translation = (raw[start : start + length].split(b"\0")[0] for length, start in pair)
        if original:
            yield original.decode(charset), translation.decode(charset)
        elif found := re.search(rb"charset=([\w.-]+)", translation):
            charset = found[1].decode()


_TEXT_READERS = {
    "text": _text,
    "docstrings": _docstrings,
    "doctests": _doctests,
    "metadata": _metadata,
    "topics": _topics,
    "man": _man,
    "man_options": _man_options,
}
