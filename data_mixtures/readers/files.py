"""Text of a local input, in an order and an amount that depend on the files alone.

Files of an input are read in the order of a hash of their path, so that a cap in bytes takes a fair sample of them
instead of the first names of the alphabet.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import xxhash

from data_mixtures.readers import text
from data_mixtures.recipe import Input


def roots(out: Path) -> dict[str, str]:
    """What {stdlib}, {site_packages} and {corpus} stand for in the paths of an input; `out` is the data folder."""
    python = sysconfig.get_paths()
    return {"stdlib": python["stdlib"], "site_packages": python["purelib"], "corpus": str(out / "corpus")}


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


def documents(
    source_input: Input, paths: Iterable[Path], max_document_chars: int, dropped: Counter[str]
) -> Iterator[str]:
    """All texts of an input up to its cap; files and parts of files that give none are counted in `dropped`.

    It ends at the first text that does not fit under the cap, so it is at most one document short of it. ValueError for
    a line that is not JSON, or lacks the field of text.
    """
    size = 0
    for found in _read(source_input, paths, dropped):
        # string literals can hold what UTF-8 cannot (lone surrogates) and what text should not (NUL)
        clean = found.encode(errors="ignore").decode().replace("\0", "")
        for piece in text.cut(clean, max_document_chars):
            if not piece.strip():
                dropped["no_text"] += 1
                continue
            size += len(piece.encode())
            if source_input.max_bytes is not None and size > source_input.max_bytes:
                return
            yield piece


def _read(source_input: Input, paths: Iterable[Path], dropped: Counter[str]) -> Iterator[str]:
    for path in paths:
        try:
            match source_input.kind:
                case "jsonl":
                    yield from text.json_texts(path, source_input.field)
                case "docstrings":
                    yield text.docstrings(str(path), text.read(path))
                case _:
                    yield text.read(path)
        except text.Unreadable as error:
            dropped[str(error)] += 1
        except PermissionError:
            dropped["no_permission"] += 1
