"""Text of local files: plain text and JSON lines, gzipped or not, and the docstrings of Python files.

Order and amount depend on the files alone: files of an input are read in the order of a hash of their path, so that a
cap in bytes takes a fair sample of them instead of the first names of the alphabet. Nothing is guessed: a file that is
not UTF-8, or that cannot be parsed, gives a named reason, which is counted in the manifest.
"""

from __future__ import annotations

import ast
import fnmatch
import glob
import gzip
import os
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import xxhash

from data_mixtures.recipe import Input
from records.files import json_lines

MIN_DOCSTRING_CHARS = 100
_Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def roots(out: Path, recipe: Path) -> dict[str, str]:
    """What {recipe}, {stdlib}... stand for in the paths of an input; the data folder and the recipe's are given."""
    python = sysconfig.get_paths()
    here = {"recipe": os.path.abspath(recipe), "corpus": str(out / "corpus")}
    return {**here, "stdlib": python["stdlib"], "site_packages": python["purelib"]}


def find(source_input: Input, roots: Mapping[str, str]) -> list[Path]:
    """The files of an input, in the order in which they are read."""
    excluded = [pattern.format(**roots) for pattern in source_input.exclude]
    found: dict[str, str] = {}
    for pattern in source_input.paths:
        for path in glob.iglob(pattern.format(**roots), recursive=True):
            if os.path.isfile(path) and not any(fnmatch.fnmatch(path, each) for each in excluded):
                found[path] = portable(path, roots)
    ordered = sorted(found, key=lambda path: (xxhash.xxh3_64_intdigest(os.fsencode(found[path])), found[path]))
    return [Path(path) for path in ordered]


def portable(path: str, roots: Mapping[str, str]) -> str:
    """A file's name in plans and orders: the same package in another folder must get the same place."""
    for name, root in sorted(roots.items(), key=lambda item: -len(item[1])):  # one may contain the other
        if path.startswith(root + os.sep):
            return name + path[len(root) :]
    return path


def documents(source_input: Input, paths: Iterable[Path], dropped: Counter[str]) -> Iterator[str]:
    """All texts of an input up to its cap; files and parts of files that give none are counted in `dropped`.

    It ends at the first text that does not fit under the cap, so it is at most one document short of it. ValueError for
    a line that is not JSON, or lacks the field of text.
    """
    size = 0
    for found in _read(source_input, paths, dropped):
        # string literals can hold what UTF-8 cannot (lone surrogates) and what text should not (NUL)
        clean = found.encode(errors="ignore").decode().replace("\0", "")
        if not clean.strip():
            dropped["no_text"] += 1
            continue
        size += len(clean.encode())
        if source_input.max_bytes is not None and size > source_input.max_bytes:
            return
        yield clean


def _read(source_input: Input, paths: Iterable[Path], dropped: Counter[str]) -> Iterator[str]:
    for path in paths:
        try:
            match source_input.kind:
                case "jsonl":
                    yield from json_texts(path, source_input.field)
                case "docstrings":
                    yield docstrings(str(path), read(path))
                case _:
                    yield read(path)
        except Unreadable as error:
            dropped[str(error)] += 1
        except PermissionError:
            dropped["no_permission"] += 1


class Unreadable(Exception):
    """A file that gives no text; the message is the reason that the manifest counts."""


def read(path: Path) -> str:
    """A text file with \\n as line end. Unreadable: broken_gzip, not_utf8, not_text."""
    raw = path.read_bytes()
    try:
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8")
    except (OSError, EOFError, zlib.error) as error:
        raise Unreadable("broken_gzip") from error
    except UnicodeDecodeError as error:
        raise Unreadable("not_utf8") from error
    if "\0" in text:
        raise Unreadable("not_text")
    return text.replace("\r\n", "\n")


def json_objects(path: Path) -> Iterator[tuple[int, Any]]:
    """(number from 1, value) of every line that is not blank. ValueError: a line that is not JSON, or a broken .gz."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        try:
            yield from json_lines(file, path)
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise ValueError(f"{path} is damaged or truncated: {error}") from error


def json_texts(path: Path, field: str) -> Iterator[str]:
    """The text of every line; null counts as empty. ValueError names a line where it is missing or no string."""
    for number, row in json_objects(path):
        if not isinstance(row, dict) or field not in row:
            known = f"its fields: {', '.join(row)}" if isinstance(row, dict) else f"it is {type(row).__name__}"
            raise ValueError(f"{path}:{number}: has no {field!r}; {known}. Set `field` of the input")
        if not isinstance(row[field], str | None):
            raise ValueError(f"{path}:{number}: {field!r} is {type(row[field]).__name__}, it must be a string")
        yield row[field] or ""


def docstrings(path: str, text: str) -> str:
    """A module's documentation as one text: names and docstrings without their examples. Unreadable: not_python."""
    entries = []
    for name, docstring in definitions(path, text):
        prose = re.sub(r"\n{3,}", "\n\n", _without_examples(docstring)).strip()
        if len(prose) >= MIN_DOCSTRING_CHARS:
            entries.append(f"{name}\n\n{prose}")
    return "\n\n".join(entries)


def definitions(path: str, text: str) -> Iterator[tuple[str, str]]:
    """(dotted name, docstring) of a Python file, in its order. Unreadable: not_python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unreadable("not_python") from error
    # only definitions are visited, which is much faster than ast.walk
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


def _without_examples(docstring: str) -> str:
    kept, inside = [], False
    for line in docstring.split("\n"):
        inside = line.lstrip().startswith(">>>") or (inside and bool(line.strip()))
        if not inside:
            kept.append(line)
    # the headings of sections that held nothing else
    return re.sub(r"^[ \t]*Examples?:*[ \t]*\n([ \t]*[=-]{3,}[ \t]*\n)?", "", "\n".join(kept), flags=re.MULTILINE)
