"""Checks the structure of the source against its budgets; exit status 1 if one is exceeded.

    python -m tools.check structure [--root DIR]

Size is counted in Python tokens a package (no comments, docstrings, line ends or indentation; tests and
examples excluded), because a budget in lines rewards dense lines. Budgets only go down: one that is more than
SLACK above what it measures is reported as well, and a feature that needs more says in its commit what was
removed for it.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from .imports import PACKAGES, broken_arrows, circles, edges, folder_edges

ROOT = Path(__file__).resolve().parents[2]
TOKEN_BUDGETS = {
    "records": 13_170,
    "laneformer": 131_000,
    "data_mixtures": 62_200,
    "train": 38_960,
    "evals": 39_600,
    "tools": 157_320,
}
SLACK = 0.03
LIMITS = {"file": 400, "kernel file": 600, "function": 60, "class": 200}  # lines
DEFINITIONS: dict[Any, str] = {
    ast.FunctionDef: "function",
    ast.AsyncFunctionDef: "function",
    ast.ClassDef: "class",
}
COLUMNS, LONG_LINES_PERCENT = 110, 2
SAMPLING_RULE_FILES = 5
PYTHON, KERNELS = {".py", ".pyi"}, {".cu", ".cuh"}
SUFFIXES = {".cpp", ".h", *PYTHON, *KERNELS}
LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
SAMPLING_RULE = re.compile(r"\bmin_?p\b", re.IGNORECASE)  # stands in every file that knows the rule
# the engine's schedule, once it stands in C++ alone, cuts these
LONG_CLASSES = {
    "Engine", "Geometry", "Scheduler",
}  # fmt: skip
LONG_FILES = {"models/laneformer/engine/engine.py"}


@dataclass
class Measure:
    """One row of the table; `found` lists what was counted, or what exceeds the limit."""

    name: str
    value: float
    limit: float
    found: list[str] = field(default_factory=list)
    exact: bool = False  # a limit far above the value is an error as well

    @property
    def ok(self) -> bool:
        return (1 - SLACK) * self.limit * self.exact <= self.value <= self.limit


def measures(root: Path = ROOT) -> list[Measure]:
    """Every measure of the checkout at `root` with its limit."""
    texts, found = sources(root), edges(root)
    arrows = broken_arrows(found)
    modules, folders = ([" <-> ".join(group) for group in circles(e)] for e in (found, folder_edges(found)))
    rule = [str(p) for p, text in texts.items() if SAMPLING_RULE.search(text) and p.parts[0] != "tools"]
    return [
        Measure("import circles of modules", len(modules), 0, modules),
        Measure("import circles of folders", len(folders), 0, folders),
        Measure("imports against the plan", len(arrows), 0, arrows),
        Measure("files that know the sampling rule", len(rule), SAMPLING_RULE_FILES, rule),
        *sizes(texts),
        *token_measures(texts),
    ]


def sources(root: Path) -> dict[Path, str]:
    """Text of every source file by its path below `root`: what is compiled or interpreted, without tests."""
    files = [file for folder in PACKAGES.values() for file in sorted((root / folder).rglob("*"))]
    return {f.relative_to(root): f.read_text(encoding="utf-8") for f in files if f.suffix in SUFFIXES}


def sizes(texts: dict[Path, str]) -> list[Measure]:
    """Lines of files, functions and classes, and the share of long lines."""
    lengths: dict[str, list[tuple[str, int]]] = {what: [] for what in LIMITS}
    long, total = [], 0
    for path, text in texts.items():
        lines = text.splitlines()
        total += len(lines)
        long += [f"{path}:{n}" for n, line in enumerate(lines, 1) if len(line) > COLUMNS]
        if path.suffix in KERNELS or path.parent.name == "kernels":
            lengths["kernel file"].append((str(path), len(lines)))
        elif str(path) not in LONG_FILES:
            lengths["file"].append((str(path), len(lines)))
        if path.suffix not in PYTHON:
            lengths["function"] += [(f"{path}: {name}", count) for name, count in cpp_functions(text)]
            continue
        node: Any
        for node in ast.walk(ast.parse(text)):
            what = DEFINITIONS.get(type(node))
            if what and node.name not in LONG_CLASSES:
                lengths[what].append((f"{path}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1))
    percent = round(100 * len(long) / max(1, total), 1)
    return [
        *(longest(what, lengths[what], limit) for what, limit in LIMITS.items()),
        Measure(f"% of lines above {COLUMNS} columns", percent, LONG_LINES_PERCENT, long),
    ]


def longest(what: str, lengths: list[tuple[str, int]], limit: int) -> Measure:
    """The largest of `lengths`, and all above the limit."""
    above = [f"{name}: {n}" for name, n in lengths if n > limit]
    return Measure(f"lines of the longest {what}", max((n for _, n in lengths), default=0), limit, above)


def token_measures(texts: dict[Path, str]) -> list[Measure]:
    """Python tokens of each package against its budget."""
    python = {path: python_tokens(text) for path, text in texts.items() if path.suffix == ".py"}
    found = []
    for package, budget in TOKEN_BUDGETS.items():
        count = sum(n for path, n in python.items() if path.is_relative_to(PACKAGES[package]))
        found.append(Measure(f"Python tokens of {package}", count, budget, exact=True))
    return found


def python_tokens(text: str) -> int:
    """Tokens of a Python source without comments, docstrings, line ends and indentation."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        node.body[0].lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
    }
    return sum(
        token.type not in LAYOUT and not (token.type == tokenize.STRING and token.start[0] in docstrings)
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )


def cpp_functions(text: str) -> Iterator[tuple[str, int]]:
    """Name and lines of each definition, by its braces, nested lambdas included; comments, strings and directives
    are blanked first.
    """
    blank = r"//[^\n]*|^[ \t]*#(?:\\\n|[^\n])*" + r'|"(?:\\.|[^"\\\n])*"' + r"|'(?:\\.|[^'\\\n])'"
    code = re.sub(blank, lambda match: re.sub(r"[^\n]", " ", match[0]), text, flags=re.MULTILINE)
    start, depth, name = 0, 0, ""
    for mark in re.finditer(r"[;{}]", code):
        if name:
            depth += {"{": 1, "}": -1, ";": 0}[mark[0]]
            # the braces of a constructor's `: member{value}, other{value} {` are not the function's last
            if depth == 0 and mark[0] == "}" and not re.match(r"\s*[,{]", code[mark.end() :]):
                yield name, code.count("\n", start, mark.end()) + 1
                start, name = mark.end(), ""
            continue
        head = code[start : mark.start()]
        called = re.search(r"(?<![\w:])(?!__\w+__|alignas)([\w:~]+)\s*\(", head)
        if mark[0] == "{" and called and not re.search(r"\b(namespace|class|struct|enum)\b[^()]*$", head):
            name, depth, start = called[1], 1, start + len(head) - len(head.lstrip())
        else:
            start = mark.end()


def main(root: Path = ROOT) -> None:
    """Check the structure of the source against its budgets.

    Args:
        root: Checkout to check.
    """
    console, rows = Console(soft_wrap=True), measures(root)
    table = Table("measure", "value", "limit", "")
    for row in rows:
        wrong = "[red]exceeded[/]" if row.value > row.limit else "[red]lower the budget[/]"
        verdict = "ok" if row.ok else wrong
        table.add_row(row.name, f"{row.value:,}", f"{row.limit:,}", verdict)
    total = sum(row.value for row in rows if row.exact)
    table.add_row("Python tokens in all", f"{total:,}", f"{sum(TOKEN_BUDGETS.values()):,}", "")
    console.print(table)
    for row in rows:
        if not row.ok and row.found:
            console.print(f"\n{row.name}:", *row.found, sep="\n  ", markup=False, highlight=False)
    raise SystemExit(any(not row.ok for row in rows))


if __name__ == "__main__":
    tyro.cli(main, prog="python -m tools.check structure")
