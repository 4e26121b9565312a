"""Check the size and structure of the tree; exit status 1 if something has grown.

python -m tools.check structure            check
python -m tools.check structure --write    write today's counts into size.json
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import lizard
import tyro

from tools import ROOT
from tools.markdown import table

from .imports import (
    PACKAGES,
    find_circles,
    find_edges,
    find_folder_edges,
    find_forbidden_edges,
)

SIZE_FILE = "tools/check/size.json"
# the tree may exceed the smallest value that a count of size.json had in any commit by this share, so a
# change can only spend what was removed before it
RATCHET_SLACK = 0.015
# lines; the class is the longest of today: it falls to 200
LIMITS = {"file": 400, "kernel file": 600, "function": 60, "class": 200}
TESTS = ("tests", "examples")
NATIVE = {".cpp", ".h", ".cu", ".cuh", ".js", ".css"}
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass
class Measure:
    """One row of the table; `excess` lists what exceeds the limit."""

    name: str
    value: int
    limit: int
    excess: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.value <= self.limit


def measure_tree() -> list[Measure]:
    """Return every measure of this checkout with its limit."""
    arrows = find_edges(ROOT)
    violations = {
        "import circles of modules": [" <-> ".join(group) for group in find_circles(arrows)],
        "import circles of folders": [
            " <-> ".join(group) for group in find_circles(find_folder_edges(arrows))
        ],
        "imports that the plan forbids": find_forbidden_edges(arrows),
    }
    return [
        *(Measure(name, len(rows), 0, rows) for name, rows in violations.items()),
        *measure_lengths(ROOT),
        *measure_sizes(ROOT),
    ]


def measure_sizes(root: Path) -> list[Measure]:
    smallest = read_smallest_sizes(root)
    return [
        Measure(name.replace("_", " "), size, round(smallest[name] * (1 + RATCHET_SLACK)))
        for name, size in count_sizes(root).items()
    ]


def count_sizes(root: Path) -> dict[str, int]:
    """Return the three counts of the tree, without untracked folders."""
    sizes = {
        "python_tokens_of_source": 0,
        "python_tokens_of_tests_and_examples": 0,
        "native_lines": 0,
    }
    for folder in {*PACKAGES.values(), *TESTS}:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix == ".py":
                kind = "tests_and_examples" if folder in TESTS else "source"
                sizes[f"python_tokens_of_{kind}"] += count_tokens(path.read_text(encoding="utf-8"))
            elif path.suffix in NATIVE and folder not in TESTS:
                sizes["native_lines"] += len(path.read_text(encoding="utf-8").splitlines())
    return sizes


def read_smallest_sizes(root: Path) -> dict[str, int]:
    """Return the smallest value of each count in size.json, now or in git's history."""
    # whoever needs room cannot edit the history; without git (a tarball) the file alone counts
    smallest: dict[str, int] = json.loads((root / SIZE_FILE).read_text())
    command = ["git", "log", "-m", "-p", "--format=", "--", SIZE_FILE]
    log = subprocess.run(command, cwd=root, capture_output=True, text=True).stdout
    for name, size in re.findall(r'(?m)^[+-]\s*"(\w+)": (\d+)', log):
        if name in smallest:
            smallest[name] = min(smallest[name], int(size))
    return smallest


def count_tokens(text: str) -> int:
    """Count tokens of a Python source without comments, docstrings, line ends and indentation."""
    # not lines: a budget in lines rewards dense ones
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        node.body[0].lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, owners) and ast.get_docstring(node, clean=False) is not None
    }
    return sum(
        token.type not in LAYOUT
        and not (token.type == tokenize.STRING and token.start[0] in docstrings)
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )


def measure_lengths(root: Path) -> list[Measure]:
    """Return the longest file, function and class of the source, and all above the limits."""
    lengths: dict[str, list[tuple[int, str]]] = {kind: [] for kind in LIMITS}
    for folder in PACKAGES.values():
        for path in sorted((root / folder).rglob("*")):
            if path.suffix == ".py" or path.suffix in NATIVE:
                for kind, lines, name in list_lengths(path):
                    lengths[kind].append((lines, f"{path.relative_to(root)} {name}"))
    return [
        Measure(
            f"lines of the longest {kind}",
            max((lines for lines, _ in lengths[kind]), default=0),
            limit,
            [f"{name}: {lines}" for lines, name in lengths[kind] if lines > limit],
        )
        for kind, limit in LIMITS.items()
    ]


def list_lengths(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (kind, lines, name) of a file and of each function and class in it."""
    text = path.read_text(encoding="utf-8")
    is_kernel = path.suffix in {".cu", ".cuh"} or path.parent.name == "kernels"
    yield "kernel file" if is_kernel else "file", len(text.splitlines()), ""
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                yield kind, (node.end_lineno or 0) - node.lineno + 1, f":{node.lineno} {node.name}"
    elif path.suffix not in {".js", ".css"}:
        # lizard chooses its language by the file's name and knows no .cuh
        for function in lizard.analyze_file.analyze_source_code("kernel.cpp", text).function_list:
            lines = function.end_line - function.start_line + 1
            yield "function", lines, f":{function.start_line} {function.name}"


def check_structure(write: bool = False) -> None:
    """Check the size and the structure of the tree.

    Args:
        write: Write the counts of today into size.json, and check nothing.
    """
    if write:
        (ROOT / SIZE_FILE).write_text(json.dumps(count_sizes(ROOT), indent=2) + "\n")
        return
    rows = measure_tree()
    columns = ("measure", "value", "limit", "holds")
    print(table(columns, [(row.name, row.value, row.limit, row.ok) for row in rows]))
    for row in rows:
        if row.excess:
            print(f"\n{row.name}:", *row.excess, sep="\n  ")
    raise SystemExit(any(not row.ok for row in rows))


def main() -> None:
    tyro.cli(check_structure, prog="python -m tools.check structure")


if __name__ == "__main__":
    main()
