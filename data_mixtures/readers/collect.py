"""Text of a local input, in an order and an amount that depend on the files alone.

Files of an input are taken in the order of a hash of their path, so that a cap in bytes takes a fair sample of them
instead of the first names of the alphabet.
"""

from __future__ import annotations

import fnmatch
import functools
import glob
import itertools
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

from data_mixtures.readers import generated, texts
from data_mixtures.recipe import GENERATED, Input


def files(source_input: Input) -> list[Path]:
    """The files an input would read, in the order in which it reads them."""
    roots = _roots()
    found: dict[str, str] = {}
    for pattern in source_input.paths:
        for path in glob.iglob(pattern.format(**roots), recursive=True):
            if os.path.isfile(path) and not any(
                fnmatch.fnmatch(path, bad.format(**roots)) for bad in source_input.exclude
            ):
                found[path] = portable(path)
    return [
        Path(path) for path in sorted(found, key=lambda p: (xxhash.xxh3_64_intdigest(os.fsencode(found[p])), found[p]))
    ]


@functools.cache
def _roots() -> dict[str, str]:
    return {"stdlib": sysconfig.get_path("stdlib"), "site_packages": sysconfig.get_path("purelib")}


def portable(path: str) -> str:
    """A file's name in plans and orders: the same package in another folder must come at the same place."""
    for name, root in sorted(_roots().items(), key=lambda item: -len(item[1])):  # one may contain the other
        if path.startswith(root + os.sep):
            return name + path[len(root) :]
    return path


def documents(
    source_input: Input, paths: Iterable[Path], max_document_chars: int, dropped: Counter[str]
) -> Iterator[str]:
    """All texts of an input up to its cap; files and parts of files that give none are counted in `dropped`."""
    if source_input.kind in GENERATED:
        generate = functools.partial(generated.generate, source_input.kind)
        return _capped(map(generate, itertools.count()), source_input.max_bytes)
    return _capped(_read(source_input.kind, paths, max_document_chars, dropped), source_input.max_bytes)


def _capped(found: Iterator[str], max_bytes: int | None) -> Iterator[str]:
    """Documents up to the first one that does not fit under the cap (so at most one document short of it)."""
    size = 0
    for text in found:
        size += len(text.encode())
        if max_bytes is not None and size > max_bytes:
            return
        yield text


def _read(kind: str, paths: Iterable[Path], max_chars: int, dropped: Counter[str]) -> Iterator[str]:
    for path in paths:
        try:
            found = texts.read(kind, str(path), path.read_bytes(), max_chars)
        except (texts.Unreadable, PermissionError) as error:
            dropped[str(error) if isinstance(error, texts.Unreadable) else "no_permission"] += 1
            continue
        for text in found:
            if text.strip():
                yield text
            else:
                dropped["no_text"] += 1
