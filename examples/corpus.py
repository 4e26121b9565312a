"""The demo's text, found on this machine or written by us, as JSON lines: `python -m examples.corpus --out DIR`.

Manual pages, translations of programs, package descriptions, Python's reference, examples of docstrings, and generated
text: DIR/<source>.jsonl, one {"text": ...} a line, which data_mixtures/demo.toml reads. Unchanged files are not written
again, so that what was prepared from them stays valid.
"""

from __future__ import annotations

import ast
import doctest
import email.parser
import email.policy
import itertools
import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import tyro

from data_mixtures.readers import files, text
from data_mixtures.recipe import Input
from examples import generated, manpages
from records.files import write_atomically

MIN_MESSAGE_CHARS = 24  # of a translation; shorter ones are labels of buttons
CATALOG_CHARS = 4_000  # a catalog of translations is cut into documents of about this size


Texts = Iterator[str]


def main(out: Path) -> None:
    """Write the demo's corpus."""
    write(out, demo())


def write(out: Path, sources: Mapping[str, Iterable[tuple[Texts, int | None]]]) -> None:
    """One file a source, of parts: texts, and how many bytes of them to take (None: all)."""
    out.mkdir(parents=True, exist_ok=True)
    for name, parts in sources.items():
        found = (each for texts, max_bytes in parts for each in _capped(texts, max_bytes))
        lines = "".join(json.dumps({"text": each}) + "\n" for each in found if each.strip())
        path = out / f"{name}.jsonl"
        if not path.is_file() or path.read_text() != lines:
            write_atomically(path, lines)


def _capped(texts: Texts, max_bytes: int | None) -> Texts:
    size = 0
    for each in texts:
        size += len(each.encode(errors="ignore"))
        if max_bytes is not None and size > max_bytes:
            return
        yield each


def read(reader: Callable[[Path], list[str]], *paths: str, exclude: tuple[str, ...] = ()) -> Texts:
    """The documents of all files of these globs that can be read, in an order that depends on the files alone."""
    for path in files.find(Input("text", paths, exclude=exclude), files.roots(Path())):
        with suppress(text.Unreadable, PermissionError):
            yield from reader(path)


def man(path: Path) -> list[str]:
    return [manpages.page(text.read(path))]


def man_options(path: Path) -> list[str]:
    """The options of a manual page as questions and answers."""
    return [manpages.options(text.read(path))]


def metadata(path: Path) -> list[str]:
    """The long description of an installed package."""
    message = email.parser.Parser(policy=email.policy.compat32).parsestr(text.read(path))
    return [str(message.get_payload() or message.get("Description") or "").strip()]


def topics(path: Path) -> list[str]:
    """The Python reference manual as `help()` holds it: one string per topic."""
    assignments = [node.value for node in ast.parse(text.read(path)).body if isinstance(node, ast.Assign)]
    values = ast.literal_eval(assignments[0])
    return [values[name] for name in sorted(values)]


def doctests(path: Path) -> list[str]:
    """One text per docstring with examples: what it is about, then input as question and output as answer."""
    source = text.read(path)
    if ">>>" not in source:  # parsing is the expensive part
        return []
    texts = []
    for name, docstring in text.definitions(str(path), source):
        try:
            examples = doctest.DocTestParser().get_examples(docstring)
        except ValueError:
            continue  # a malformed docstring; the others of its file may be good
        if session := _session(examples):
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


def gettext(path: Path) -> list[str]:
    """The translations of a .mo file, long messages only."""
    try:
        pairs = list(_messages(path.read_bytes()))
    except (struct.error, UnicodeDecodeError, LookupError) as error:
        raise text.Unreadable("not_gettext") from error
    documents: list[list[str]] = [[]]
    size = 0
    for original, translation in pairs:
        if translation == original or len(translation) < MIN_MESSAGE_CHARS:
            continue
        if size > CATALOG_CHARS:
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
        raise text.Unreadable("not_gettext")
    count, *tables = struct.unpack_from(order + "3I", raw, 8)
    entries = [[struct.unpack_from(order + "2I", raw, at + 8 * i) for i in range(count)] for at in tables]
    charset = "utf-8"
    for pair in zip(*entries, strict=True):
        original, translation = (raw[start : start + length].split(b"\0")[0] for length, start in pair)
        if original:
            yield original.decode(charset), translation.decode(charset)
        elif found := re.search(rb"charset=([\w.-]+)", translation):
            charset = found[1].decode()


def demo() -> dict[str, list[tuple[Texts, int | None]]]:
    """The corpus of demo.toml, by source."""
    tested = ("sympy", "networkx", "numpy", "pandas", "torch", "mpmath")  # packages with many examples in docstrings
    modules = [f"{{site_packages}}/{package}/**/*.py" for package in tested]
    translated = read(man, "/usr/share/man/[a-z][a-z]*/man[1-8]/*", exclude=("/usr/share/man/man*",))
    commands = ("/usr/share/man/man1/*", "/usr/share/man/man8/*")
    return {
        "web": [
            (read(metadata, "{site_packages}/*.dist-info/METADATA"), 1_000_000),
            (read(topics, "{stdlib}/pydoc_data/topics.py"), 1_000_000),
            (read(man, "/usr/share/man/man[2-7]/*", exclude=("*.3ssl*", "*.3pm*")), 3_000_000),
        ],
        "math": [(map(generated.arithmetic, itertools.count()), 3_500_000)],
        "multilingual": [
            (translated, 1_800_000),
            (read(gettext, "/usr/share/locale/*/LC_MESSAGES/*.mo", exclude=("*/locale/en*",)), 1_200_000),
            (map(generated.phrases, itertools.count()), 600_000),
        ],
        "qa": [
            (read(doctests, *modules, exclude=("*/tests/*", "*/test_*")), 2_500_000),
            (read(man_options, *commands, exclude=("*/gcloud*",)), 700_000),
        ],
    }


if __name__ == "__main__":
    tyro.cli(main)
