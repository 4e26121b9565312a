"""Local files, or files behind a URL: listing them, and reading the documents of text and JSON lines.

A file or line that cannot be read gets a named reason, which is counted in the manifest.
"""

from __future__ import annotations

import codecs
import fnmatch
import glob
import itertools
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, BinaryIO, TypeVar

import fsspec
import xxhash

from data_mixtures.readers.unpack import Unreadable, explain_errors, open_input, split_codec
from data_mixtures.recipe import Input
from data_mixtures.shards import Json
from records.files import Skipped, json_lines

T = TypeVar("T")
SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
UNREADABLE = (
    *(".csv", ".tsv", ".arrow", ".feather", ".orc", ".avro", ".pdf"),
    *(".xz", ".7z", ".zip", ".tar", ".tgz"),
)
# reasons for which a file or line was not read, besides those for which `filter` may drop a text
# that was
DAMAGE = (
    *("damaged", "long_window", "not_utf8", "not_text", "too_large"),
    *("not_json", "no_field", "no_permission"),
)
NOT_LINES = (
    "is it pretty-printed, or one array? JSON lines are one object a line: jq -c . FILE > NEW.jsonl, or "
    "jq -c '.[]' for an array"
)
LARGEST_BYTES = 1 << 30  # of a text file: it is one document, and Arrow takes no text of 2 GiB
_PLACE = re.compile(r"/|\{|\w+://")  # how a path begins that is not relative to the recipe's folder
# name, bytes, and what changes with the content: nanoseconds of a local file, or a tag of a store
FileVersion = list[Any]


def roots(out: os.PathLike[str] | str, recipe: os.PathLike[str] | str) -> dict[str, str]:
    """Return what {recipe}, {stdlib}... stand for in paths."""
    python = sysconfig.get_paths()
    folders = {"recipe": os.path.abspath(recipe), "corpus": os.path.join(out, "corpus")}
    return {**folders, "stdlib": python["stdlib"], "site_packages": python["purelib"]}


def find(
    source_input: Input, roots: Mapping[str, str], all_match: bool = True
) -> list[FileVersion]:
    """List the files of an input in the order in which they are read.

    Raises:
        ValueError: names all paths that match no file, unless `all_match` is false.
    """
    excluded = [pattern_of(path, roots, anchored=False) for path in source_input.exclude]
    files: dict[str, FileVersion] = {}
    unmatched = []
    for path in source_input.paths:
        pattern = pattern_of(path, roots)
        matches = {file[0]: file for file in _glob(pattern)}
        chosen = {}
        for name, file in matches.items():
            names = name, portable(name, roots)
            if not any(
                exclusion in names or fnmatch.filter(names, exclusion) for exclusion in excluded
            ):
                chosen[name] = file
        if not chosen:
            folder = f" (a folder; give its files, such as {pattern}/**/*)"
            hint = " (all excluded)" if matches else folder * os.path.isdir(pattern)
            unmatched.append(pattern + hint)
        files |= chosen
    if unmatched and all_match:
        raise ValueError(f"no file matches {', '.join(unmatched)}")
    for name in files:
        # the plan is JSON, which cannot hold such a name
        if name.encode(errors="ignore").decode() != name:
            raise ValueError(
                f"the name of the file {name!r} is not UTF-8; rename it, or exclude it"
            )
    places = [(portable(name, roots), file) for name, file in files.items()]
    # by a hash of their names, so that a cap takes a fair sample and not the alphabet's first names
    places.sort(key=lambda place: (xxhash.xxh3_64_intdigest(os.fsencode(place[0])), place[0]))
    return [file for _, file in places[: source_input.files]]


def pattern_of(
    path: str, roots: Mapping[str, str] = MappingProxyType({}), anchored: bool = True
) -> str:
    """Return the pattern of a path, for `glob` and for what takes patterns as `datasets` does.

    Args:
        path: a file or a pattern; ~ is the home folder.
        roots: as `roots` returns them. With a root "recipe", a relative path is of that folder.
        anchored: false for a pattern that is compared with whole names, such as */drafts/*.
    """
    path = os.path.expanduser(path)
    relative = "recipe" in roots and not _PLACE.match(path)
    place = f"{{recipe}}/{path}" if relative else path
    pattern = place if anchored else path
    for name, root in roots.items():
        place = place.replace(f"{{{name}}}", root)
        pattern = pattern.replace(f"{{{name}}}", glob.escape(root))
    # names such as br[ack]et.jsonl read as patterns, and would match nothing
    return glob.escape(place) if os.path.isfile(place) else pattern


def portable(path: str, roots: Mapping[str, str]) -> str:
    """Return a file's name in plans and origins, which is independent of where the roots are."""
    # the longest root first, as one may contain the other
    for name, root in sorted(roots.items(), key=lambda item: -len(item[1])):
        if path.startswith(root + os.sep):
            return path[len(root) + 1 :] if name == "recipe" else name + path[len(root) :]
    return path


def _glob(pattern: str) -> Iterator[FileVersion]:
    if "://" not in pattern:
        yield from map(_stat_file, filter(os.path.isfile, glob.iglob(pattern, recursive=True)))
        return
    with explain_errors(pattern):
        system, name = fsspec.url_to_fs(pattern)
        if glob.has_magic(name) and system.isfile(name):
            yield _describe_remote(pattern, system.info(name))
            return
        for path, info in system.glob(name, detail=True).items():
            if info["type"] == "file":
                # listings of web servers lack the size
                info = info if info["size"] is not None else system.info(path)
                yield _describe_remote(system.unstrip_protocol(path), info)


def _stat_file(name: str) -> FileVersion:
    """Return a file's current version; FileNotFoundError if it is gone."""
    if "://" in name:
        system, path = fsspec.url_to_fs(name)
        return _describe_remote(name, system.info(path))
    status = os.stat(name)
    return [name, status.st_size, status.st_mtime_ns]


def _describe_remote(name: str, info: Json) -> FileVersion:
    tags = (info.get(key) for key in ("ETag", "etag", "md5Hash", "blob_id", "mtime"))
    if info["size"] is None:
        raise ValueError("the server does not say how large it is")
    return [name, info["size"], str(next((tag for tag in tags if tag), ""))]


def check_unchanged(files: Iterable[FileVersion]) -> None:
    """Raise ValueError for a file that differs from its plan."""
    remedy = "start again with `plan`, which lists the files again, or with `prepare`"
    for name, size, version in files:
        try:
            _, current_bytes, current = _stat_file(name)
        except FileNotFoundError as error:
            raise ValueError(f"{name} is planned and no longer there; {remedy}") from error
        if (current_bytes, current) != (size, version):
            difference = f"{size:,} bytes then, {current_bytes:,} now"
            if current_bytes == size:
                difference = "same size, other time or tag"
            raise ValueError(f"{name} has changed since it was planned ({difference}); {remedy}")


def check_kind(source_input: Input, files: Iterable[FileVersion]) -> None:
    """Raise ValueError for a file whose suffix is of another kind than its input."""
    expected = "parquet" if source_input.kind == "resolved" else source_input.kind
    for name, _, _ in files:
        plain, codec = split_codec(name)
        suffix = os.path.splitext(plain)[1].lower()
        if suffix in UNREADABLE or (codec and expected == "parquet"):
            raise ValueError(
                f"{name} is not read; convert it to Parquet, JSON lines or text, or exclude it"
            )
        if SUFFIXES.get(suffix, expected) != expected:
            mends = f"its input has kind = {source_input.kind!r}; correct it, or exclude it"
            raise ValueError(f"{name} is {SUFFIXES[suffix]}, {mends}")


class Dropped(Counter[str]):
    """Counts of what was not read, by reason, with the first place of each."""

    def __init__(self) -> None:
        super().__init__()
        self.examples: dict[str, str] = {}
        # JSON lines read: rows of the next unit of the same file are counted on from here
        self.lines = 0
        # documents that lost lone surrogates, which JSON can hold and UTF-8 cannot
        self.surrogates = 0
        # names of files that are lost as a whole
        self.files: set[str] = set()

    def add(self, reason: str, place: str, count: int = 1) -> None:
        self[reason] += count
        self.examples.setdefault(reason, place)

    def add_file(self, name: str, error: Unreadable, count: int = 1) -> None:
        """Count a whole file, or `count` documents of it."""
        self.add(error.reason, f"{name} ({error.fix})" if error.fix else name, count)
        self.files.add(name)


class DamagedFile(Exception):
    """A file whose documents cannot be read to the end: (name, what is wrong, rows before).

    It is final: the file itself is damaged, and its unit is read again without it.
    """


Document = tuple[str, str, int, Json]  # text, file, row from 0, and the fields beside the text


def documents(
    source_input: Input, names: Iterable[str], dropped: Dropped, span: tuple[int, int] | None = None
) -> Iterator[Document]:
    """Yield the documents of text files or JSON lines, up to the input's cap.

    Args:
        dropped: counts what gives no document.
        span: read only the JSON lines that begin in these bytes; rows are counted from there.
    """
    size = 0
    for text, name, row, fields in _read_files(source_input, names, dropped, span):
        try:
            utf8 = text.encode()
        except UnicodeEncodeError:
            dropped.surrogates += 1
            utf8 = text.encode(errors="ignore")
            text = utf8.decode()
        if not text.strip():
            dropped.add("no_text", f"{name}:{row + 1}")
            continue
        size += len(utf8)
        if source_input.max_bytes is not None and size > source_input.max_bytes:
            return
        yield text, name, row, fields


def _read_files(
    source_input: Input, names: Iterable[str], dropped: Dropped, span: tuple[int, int] | None
) -> Iterator[Document]:
    for name in names:
        try:
            if source_input.kind == "text":
                yield read(name), name, 0, {}
            else:
                yield from _read_rows(name, source_input.field, dropped, span)
        except Unreadable as error:
            dropped.add_file(name, error)
        except PermissionError:
            dropped.add_file(name, Unreadable("no_permission"))


def read(name: str | os.PathLike[str]) -> str:
    r"""Read a text file with \n as line end. Unreadable: damaged, not_utf8, not_text, too_large."""
    with open_input(os.fspath(name)) as file:
        if len(raw := file.read(LARGEST_BYTES + 1)) > LARGEST_BYTES:
            raise Unreadable("too_large")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable("not_utf8") from error
    if "\0" in text:
        raise Unreadable("not_text")
    return text.replace("\r\n", "\n")


def _read_rows(
    name: str, field: str, dropped: Dropped, span: tuple[int, int] | None = None
) -> Iterator[Document]:
    """Yield the documents of JSON lines; null is an empty text."""
    row = 0
    skipped = Skipped()
    place = f"{name} from byte {span[0]} on" if span and span[0] else name
    try:
        with open_input(name) as file:
            lines = _read_between(file, *span) if span else file
            for number, value in json_lines(_count_lines(lines, dropped), name, skipped):
                row += 1
                if problem := find_problem(value, field):
                    dropped.add("no_field", f"{place}:{number} {problem}")
                else:
                    yield value[field] or "", name, number - 1, value
    except Unreadable as error:
        if error.reason == "not_utf8":
            raise
        raise DamagedFile(name, error, row) from error
    finally:
        for number, kind in skipped.items():
            is_text = kind is not UnicodeDecodeError
            hint = f" ({NOT_LINES})" if is_text and number == 1 else ""
            dropped.add("not_json" if is_text else "not_utf8", f"{place}:{number}{hint}")


def _read_between(file: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
    """Yield the lines that begin at bytes begin <= i < end."""
    if begin:
        file.seek(begin - 1)
        begin += len(file.readline()) - 1
    while begin < end and (line := file.readline()):
        begin += len(line)
        yield line


def _count_lines(lines: Iterable[bytes], dropped: Dropped) -> Iterator[bytes]:
    for number, line in enumerate(lines):
        if number == 0 and _is_wide(line):
            raise Unreadable("not_utf8")
        dropped.lines += 1
        yield line


def _is_wide(line: bytes) -> bool:
    """Return whether a file is UTF-16 or UTF-32, by its first line."""
    return line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in line[:4]


def find_first_problem(name: str, field: str) -> str | None:
    """Return what is wrong with the first line of a file, or None."""
    try:
        with open_input(name) as file:
            head = list(itertools.islice(file, 100))
    except Unreadable as error:
        return f"{name} cannot be unpacked here, {error.fix}" if error.fix else None
    except PermissionError:
        return None
    if head and _is_wide(head[0]):
        return f"{name} is UTF-16 or UTF-32; convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW"
    begin = b"".join(head).lstrip(codecs.BOM_UTF8 + b" \t\r\n")[:2].strip()
    if begin in (b"{", b"["):
        return f"{name} begins with {begin.decode()!r} alone on its line: {NOT_LINES}"
    for number, value in json_lines(head, name, Skipped()):
        return (problem := find_problem(value, field)) and f"{name}:{number} {problem}"
    return None


def find_problem(value: Any, field: str) -> str | None:
    """Return what is wrong with a JSON line that should have text in `field`, or None."""
    if not isinstance(value, dict):
        return f"is a {type(value).__name__}, not an object: {NOT_LINES}"
    if field not in value:
        return f"has no {field!r}; its fields: {', '.join(value)}. Set `field` of the input"
    if not isinstance(value[field], str | None):
        return f"has {field!r} of {type(value[field]).__name__}, not text"
    return None


def json_objects(
    name: str | os.PathLike[str], skipped: Skipped | None = None
) -> Iterator[tuple[int, Any]]:
    """Yield (number from 1, value) of every line of a JSON lines file that is not blank.

    Args:
        skipped: receives the numbers of lines that are not JSON; without it they are errors.

    Raises:
        ValueError: a line is not JSON, or a compressed file is damaged or truncated.
    """
    try:
        # bytes, whose lines end at a newline alone: str.splitlines would end them at U+2028, U+2029
        # and U+0085 inside of strings, too
        with open_input(os.fspath(name)) as file:
            yield from json_lines(file, name, skipped)
    except Unreadable as error:
        raise ValueError(f"{name} is damaged or truncated: {error.__cause__}") from error


def group_by_size(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Group consecutive items; a group ends with the item that reaches the limit."""
    group: list[T] = []
    size = 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if size >= limit:
            yield group
            group = []
            size = 0
    if group:
        yield group
