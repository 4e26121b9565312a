"""Text of a local source, in an order and an amount that depend on the files alone, read by any number of processes.

Files of an input are taken in the order of a hash of their path, so that a cap in bytes takes a fair sample of them
instead of the first names of the alphabet. Results are consumed in that order whatever process finishes first.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import sysconfig
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from data_mixtures import generated, texts
from data_mixtures.recipe import GENERATED, Input, LocalSource

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
_FILES_PER_TASK = 16
_DOCUMENTS_PER_TASK = 256
_AHEAD = 8  # tasks in flight: enough to keep the processes busy, few enough to waste little at a cap
Reading = tuple[list[str], Counter[str]]


def files(source_input: Input) -> list[Path]:
    """The files an input would read, in the order in which it reads them."""
    roots = {"stdlib": sysconfig.get_path("stdlib"), "site_packages": sysconfig.get_path("purelib")}
    found: dict[str, str] = {}
    for pattern in source_input.paths:
        for path in glob.iglob(pattern.format(**roots), recursive=True):
            if os.path.isfile(path) and not any(
                fnmatch.fnmatch(path, bad.format(**roots)) for bad in source_input.exclude
            ):
                found[path] = _relative(path, roots)
    return [
        Path(path) for path in sorted(found, key=lambda p: (xxhash.xxh3_64_intdigest(os.fsencode(found[p])), found[p]))
    ]


def _relative(path: str, roots: dict[str, str]) -> str:
    # the same package in another folder must come at the same place; the deeper root first, one may contain the other
    for name, root in sorted(roots.items(), key=lambda item: -len(item[1])):
        if path.startswith(root + os.sep):
            return name + path[len(root) :]
    return path


def stamp(source: LocalSource) -> str:
    """A hash of names, sizes and times of the source's files: equal means that nothing has to be read again."""
    digest = xxhash.xxh3_128()
    for source_input in source.inputs:
        for path in files(source_input):
            status = path.stat()
            digest.update(os.fsencode(path) + f"\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def collect(source: LocalSource, max_document_chars: int, pool: Executor | None) -> Reading:
    """All texts of a source and a counter of what was dropped. ValueError when the machine has too little of it."""
    collected: list[str] = []
    dropped: Counter[str] = Counter()
    for source_input in source.inputs:
        readings = _readings(source_input, max_document_chars, pool)
        collected += _capped(readings, source_input.max_bytes, dropped)
        readings.close()
    total = sum(len(text.encode()) for text in collected)
    if total < source.min_bytes:
        kinds = [f"{i.kind}: {len(files(i))} files" for i in source.inputs if i.kind not in GENERATED]
        raise ValueError(
            f"source {source.name!r} found {total} bytes of text on this machine ({', '.join(kinds)}), it needs at "
            f"least min_bytes = {source.min_bytes}; add paths with such text to its inputs, or lower min_bytes"
        )
    return collected, dropped


def _capped(readings: Iterator[Reading], max_bytes: int, dropped: Counter[str]) -> Iterator[str]:
    """Documents up to the first one that does not fit under the cap (so at most one document short of it)."""
    size = 0
    for documents, reasons in readings:
        dropped.update(reasons)
        for text in documents:
            size += len(text.encode())
            if size > max_bytes:
                return
            yield text


def _readings(source_input: Input, max_chars: int, pool: Executor | None) -> Generator[Reading]:
    if source_input.kind in GENERATED:
        tasks = ((source_input.kind, start) for start in range(0, 10**9, _DOCUMENTS_PER_TASK))
        return ordered_map(pool, _generate, tasks)
    paths = files(source_input)
    batches = (paths[i : i + _FILES_PER_TASK] for i in range(0, len(paths), _FILES_PER_TASK))
    return ordered_map(pool, _read, ((source_input.kind, batch, max_chars) for batch in batches))


def _generate(task: tuple[str, int]) -> Reading:
    kind, start = task
    return [generated.generate(kind, i) for i in range(start, start + _DOCUMENTS_PER_TASK)], Counter()


def _read(task: tuple[str, list[Path], int]) -> Reading:
    kind, paths, max_chars = task
    documents, dropped = [], Counter[str]()
    for path in paths:
        try:
            found = texts.read(kind, str(path), path.read_bytes(), max_chars)
        except (texts.Unreadable, OSError) as error:
            dropped[str(error) if isinstance(error, texts.Unreadable) else "no_permission"] += 1
            continue
        for text in found:
            if len(text.strip()) < texts.MIN_DOCUMENT_CHARS:
                dropped["too_short"] += 1
            else:
                documents.append(text)
    return documents, dropped


def ordered_map(
    pool: Executor | None, function: Callable[[_Task], _Result], tasks: Iterable[_Task]
) -> Generator[_Result]:
    """Like map, lazily: a few tasks ahead in the pool, results in the order of the tasks."""
    if pool is None:
        yield from map(function, tasks)
        return
    pending: deque[Any] = deque()
    try:
        for task in tasks:
            pending.append(pool.submit(function, task))
            if len(pending) >= _AHEAD:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
