"""Write the demo's text, found on this machine or generated, as JSON lines: `python -m examples.corpus --out DIR`.

Manual pages, what packages say of themselves, Python's reference, docstrings, their examples, and generated
text: DIR/<source>.jsonl, one {"text": ...} a line, which data_mixtures/demo.toml reads. A file that is there
is not written again; delete it to read the machine's files again.
"""

from __future__ import annotations

import ast
import doctest
import email.parser
import email.policy
import itertools
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePath

import tyro

from data_mixtures.readers import local
from data_mixtures.readers.unpack import Unreadable
from data_mixtures.recipe import Input
from examples import generated
from records.files import write_atomically

Texts = Iterator[str]
MIN_DOCSTRING_CHARS = 100
DOCUMENTED = (
    "torch",
    "numpy",
    "sympy",
    "networkx",
    "pandas",
    "pip",
    "huggingface_hub",
    "datasets",
    "fsspec",
    "setuptools",
    "rich",
    "aiohttp",
    "jinja2",
    "hypothesis",
    "tokenizers",
)
_Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def main(out: Path) -> None:
    """Write the demo's corpus."""
    write(out, demo())


def write(out: Path, sources: Mapping[str, Iterable[tuple[Texts, int | None]]]) -> None:
    """Write one file a source, of parts: texts, and how many bytes of them to take (None: all)."""
    out.mkdir(parents=True, exist_ok=True)
    for name, parts in sources.items():
        if not (path := out / f"{name}.jsonl").is_file():
            documents = (text for texts, max_bytes in parts for text in cap_bytes(texts, max_bytes))
            write_atomically(
                path,
                "".join(json.dumps({"text": text}) + "\n" for text in documents if text.strip()),
            )


def cap_bytes(texts: Texts, max_bytes: int | None) -> Texts:
    size = 0
    for text in texts:
        size += len(text.encode(errors="ignore"))
        if max_bytes is not None and size > max_bytes:
            return
        yield text


def read(
    reader: Callable[[Path], list[str]],
    *paths: str,
    exclude: tuple[str, ...] = (),
    beside: Path = Path(),
) -> Texts:
    """Yield the documents of all readable files of these globs, in an order of their names from `beside`."""
    for name, _, _ in local.find(
        Input("text", paths, exclude=exclude), local.roots(Path(), beside), all_match=False
    ):
        with suppress(Unreadable, PermissionError):
            yield from reader(Path(name))


_GLYPHS = {
    "aq": "'",
    "dq": '"',
    "lq": "“",
    "rq": "”",
    "Bq": "„",
    "Fo": "«",
    "Fc": "»",
    "em": "—",
    "en": "–",
    "ss": "ß",
}
_ACCENTS = {
    "'": "\u0301",
    "`": "\u0300",
    "^": "\u0302",
    ":": "\u0308",
    "~": "\u0303",
    ",": "\u0327",
    "v": "\u030c",
}
_ARGUMENT = re.compile(r'"((?:[^"]|"")*)"|(\S+)')
# applied one after the other
_TROFF = (
    # always true; translated pages carry lines for their translators in it
    (r"^[.']\s*if !'po4a'hide' ", "."),
    (r"^[.'] *(?:de|am|ig)\b(?s:.*?)^\.\.$|^\.TS(?s:.*?)^\.TE|^[.']?\\[\"#].*$", ""),
    # fonts, strings, sizes, motions
    (r"\\[f*](?:\(..|\[.*?\]|.)|\\s[-+]?\d+|\\[&%|^/,:c]", ""),
    (r"\\\[u([0-9A-Fa-f]{4,5})\]", lambda match: chr(int(match[1], 16))),
    (r"\\(?:\(|\[(?=..\]))(.)(.)\]?", lambda match: _glyph(match[1], match[2])),
    (
        r"^\.(?:BR|RB|BI|IB|IR|RI) (.*)$",
        lambda match: "".join(a or b for a, b in _ARGUMENT.findall(match[1])),
    ),
    (r"^\.(?:[BIR]|SM|SB) (.*)$", lambda match: match[1].replace('"', "")),
    (r'^\.(?:S[HS]|IP) "?([^"\n]{2,}?)"?(?: \d+n?)?$', r"\n\n\1\n\n"),  # headings and terms
    (r"^[.'].*$", "\n"),
    (r"\\([-' .`])", r"\1"),
    (r"\\e", r"\\"),
    (r"(?<=\S)[ \t]*\n(?=\S)", " "),
    (r"\n\s*\n", "\n\n"),
)


def _glyph(first: str, second: str) -> str:
    if first in _ACCENTS and second.isalpha():
        return unicodedata.normalize("NFC", second + _ACCENTS[first])
    return _GLYPHS.get(first + second, "")


def man(path: Path) -> list[str]:
    """Read a manual page as prose, without fonts, tables and macro definitions."""
    page = local.read(path)
    # an alias, or another dialect of troff
    if not re.search(r"^\.TH ", page, re.MULTILINE):
        return []
    for pattern, replacement in _TROFF:
        page = re.sub(pattern, replacement, page, flags=re.MULTILINE)
    return [page.strip()]


def plain(path: Path) -> list[str]:
    return [local.read(path)]


def metadata(path: Path) -> list[str]:
    """Read the long description of an installed package."""
    message = email.parser.Parser(policy=email.policy.compat32).parsestr(local.read(path))
    return [str(message.get_payload() or message.get("Description") or "").strip()]


def topics(path: Path) -> list[str]:
    """Read the Python reference manual as `help()` holds it, one text a topic."""
    assignments = [
        node.value for node in ast.parse(local.read(path)).body if isinstance(node, ast.Assign)
    ]
    values = ast.literal_eval(assignments[0])
    return [values[name] for name in sorted(values)]


def doctests(path: Path) -> list[str]:
    """Make a text of each docstring with examples: its first sentence, then questions and answers."""
    source = local.read(path)
    # parsing is the expensive part
    if ">>>" not in source:
        return []
    texts = []
    for name, docstring in definitions(str(path), source):
        parts, pending = [], ""
        # a malformed docstring; the others of its file may be good
        with suppress(ValueError):
            for example in doctest.DocTestParser().get_examples(docstring):
                pending += example.source
                if example.want:
                    parts.append(
                        f"Question: What does Python print?\n{pending}Answer:\n{example.want}"
                    )
                    pending = ""
        if parts:
            about = " ".join(docstring.split("\n\n")[0].split())
            title = name if about.startswith(">>>") else f"{name}: {about}"
            texts.append("\n\n".join([title, "\n".join(parts)]))
    return texts


def docstrings(path: Path) -> list[str]:
    """Join a module's names and docstrings, without their examples, to one text."""
    entries = []
    for name, docstring in definitions(str(path), local.read(path)):
        prose = re.sub(r"\n{3,}", "\n\n", _without_examples(docstring)).strip()
        if len(prose) >= MIN_DOCSTRING_CHARS:
            entries.append(f"{name}\n\n{prose}")
    return ["\n\n".join(entries)]


def definitions(path: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, docstring) of a Python file in its order; raise Unreadable for another."""
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
    root = max(
        (i for i, part in enumerate(parts) if part in ("site-packages", "dist-packages")),
        default=-1,
    )
    return ".".join(part for part in parts[root + 1 :] if part not in ("__init__", "/"))


def _without_examples(docstring: str) -> str:
    lines, inside = [], False
    for line in docstring.split("\n"):
        inside = line.lstrip().startswith(">>>") or (inside and bool(line.strip()))
        if not inside:
            lines.append(line)
    # the headings of sections that held nothing else
    return re.sub(
        r"^[ \t]*Examples?:*[ \t]*\n([ \t]*[=-]{3,}[ \t]*\n)?",
        "",
        "\n".join(lines),
        flags=re.MULTILINE,
    )


def demo() -> dict[str, list[tuple[Texts, int | None]]]:
    """Return the corpus of demo.toml by source."""
    # packages with many examples in docstrings
    tested = (
        "sympy",
        "networkx",
        "numpy",
        "pandas",
        "torch",
        "mpmath",
    )
    modules = [f"{{site_packages}}/{package}/**/*.py" for package in tested]
    documented = [f"{{site_packages}}/{package}/**/*.py" for package in DOCUMENTED]
    texts = ("README*", "*.txt", "*.txt.gz", "*.md", "*.md.gz", "FAQ*")
    manuals = [
        *(f"/usr/share/doc/**/{pattern}" for pattern in texts),
        "/usr/share/vim/vim*/doc/usr_*.txt",
    ]
    translated = read(
        man, "/usr/share/man/[a-z][a-z]*/man[1-8]/*", exclude=("/usr/share/man/man*",)
    )
    return {
        "web": [
            (read(docstrings, *documented, exclude=("*/tests/*", "*/test_*")), 4_000_000),
            (
                read(plain, *manuals, exclude=("*hangelog*", "*copyright*", "*google-cloud*")),
                2_000_000,
            ),
            (read(metadata, "{site_packages}/*.dist-info/METADATA"), 1_000_000),
            (read(topics, "{stdlib}/pydoc_data/topics.py"), 1_000_000),
            (read(man, "/usr/share/man/man[2-7]/*", exclude=("*.3ssl*", "*.3pm*")), 3_000_000),
        ],
        "math": [(map(generated.arithmetic, itertools.count()), 3_500_000)],
        "multilingual": [
            (translated, 3_000_000),
            (map(generated.phrases, itertools.count()), 600_000),
        ],
        "qa": [(read(doctests, *modules, exclude=("*/tests/*", "*/test_*")), 3_200_000)],
    }


if __name__ == "__main__":
    tyro.cli(main, prog="python -m examples.corpus")
