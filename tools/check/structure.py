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

import tyro
from rich.console import Console
from rich.table import Table

from .imports import PACKAGES, broken_arrows, circles, edges, folder_edges

ROOT = Path(__file__).resolve().parents[2]
TOKEN_BUDGETS = {
    "records": 11_250,
    "laneformer": 93_500,
    "data_mixtures": 51_500,
    "train": 29_300,
    "evals": 32_400,
    "tools": 106_700,
}
SLACK = 0.03
FILE_LINES, KERNEL_LINES, FUNCTION_LINES, CLASS_LINES = 400, 600, 60, 200
COLUMNS, LONG_LINES_PERCENT = 110, 2
SAMPLING_RULE_FILES = 5
KERNELS = {".cu", ".cuh"}
SUFFIXES = {".py", ".pyi", ".cpp", ".h", *KERNELS}
NOT_SOURCE = {"tests", "docs", "build", "dist", "runs", "data"}
LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
SAMPLING_RULE = re.compile(r"\bmin_?p\b", re.IGNORECASE)  # stands in every file that knows the rule
# the engine's schedule, once it stands in C++ alone, cuts these
LONG_CLASSES = {
    "Engine", "CudaDecoder", "Geometry", "SequenceDecoder", "Scheduler",
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
    tops = [top for top in sorted(root.iterdir()) if top.name not in NOT_SOURCE and top.name[0] != "."]
    files = [file for top in tops for file in ([top] if top.is_file() else sorted(top.rglob("*")))]
    return {
        f.relative_to(root): f.read_text(encoding="utf-8")
        for f in files
        if f.suffix in SUFFIXES and f.is_file()
    }


def sizes(texts: dict[Path, str]) -> list[Measure]:
    """Lines of files, functions and classes, and the share of long lines."""
    lines = {str(path): text.splitlines() for path, text in texts.items()}
    kernels = {str(path) for path in texts if path.suffix in KERNELS or path.parent.name == "kernels"}
    files = {name: len(found) for name, found in lines.items() if name not in LONG_FILES}
    bodies = {
        f"{path}: {name}": text.count("\n") + 1
        for path, whole in texts.items()
        for name, text in functions(path, whole)
    }
    long = [
        f"{name}:{n}" for name, found in lines.items() for n, x in enumerate(found, 1) if len(x) > COLUMNS
    ]
    return [
        longest("file", {name: n for name, n in files.items() if name not in kernels}, FILE_LINES),
        longest("kernel file", {name: n for name, n in files.items() if name in kernels}, KERNEL_LINES),
        longest("function", bodies, FUNCTION_LINES),
        longest("class", class_lines(texts), CLASS_LINES),
        Measure(
            f"% of lines above {COLUMNS} columns",
            round(100 * len(long) / max(1, sum(map(len, lines.values()))), 1),
            LONG_LINES_PERCENT,
            long,
        ),
    ]


def longest(what: str, lengths: dict[str, int], limit: int) -> Measure:
    """The largest of `lengths`, and all above the limit."""
    above = [f"{name}: {n}" for name, n in lengths.items() if n > limit]
    return Measure(f"lines of the longest {what}", max(lengths.values(), default=0), limit, above)


def token_measures(texts: dict[Path, str]) -> list[Measure]:
    """Python tokens of each package against its budget."""
    counted = dict.fromkeys(TOKEN_BUDGETS, 0)
    for path, text in texts.items():
        for package in TOKEN_BUDGETS:
            if path.suffix == ".py" and path.is_relative_to(PACKAGES[package]):
                counted[package] += python_tokens(text)
    return [
        Measure(f"Python tokens of {package}", counted[package], budget, exact=True)
        for package, budget in TOKEN_BUDGETS.items()
    ]


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


def class_lines(texts: dict[Path, str]) -> dict[str, int]:
    """Lines of every Python class but LONG_CLASSES, by `file: name`."""
    return {
        f"{path}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path, text in texts.items()
        if path.suffix == ".py"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and node.name not in LONG_CLASSES
    }


def functions(path: Path, text: str) -> Iterator[tuple[str, str]]:
    """(qualified name, text) of every function of a Python, C++ or CUDA file."""
    if path.suffix in (".py", ".pyi"):
        yield from python_functions(ast.parse(text), text.splitlines())
    else:
        yield from cpp_functions(text)


def python_functions(node: ast.AST, lines: list[str], scope: str = "") -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        inner = scope
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{scope}{child.name}."
            if not isinstance(child, ast.ClassDef):
                yield inner[:-1], "\n".join(lines[child.lineno - 1 : child.end_lineno])
        yield from python_functions(child, lines, inner)


def cpp_functions(text: str) -> Iterator[tuple[str, str]]:
    """Definitions by their braces, nested lambdas included; comments, strings and directives are blanked first."""
    blank = r"//[^\n]*|^[ \t]*#(?:\\\n|[^\n])*" + r'|"(?:\\.|[^"\\\n])*"' + r"|'(?:\\.|[^'\\\n])'"
    code = re.sub(blank, lambda match: re.sub(r"[^\n]", " ", match[0]), text, flags=re.MULTILINE)
    start, depth, name = 0, 0, ""
    for mark in re.finditer(r"[;{}]", code):
        if name:
            depth += {"{": 1, "}": -1, ";": 0}[mark[0]]
            # the braces of a constructor's `: member{value}, other{value} {` are not the function's last
            if depth == 0 and mark[0] == "}" and not re.match(r"\s*[,{]", code[mark.end() :]):
                yield name, text[start : mark.end()]
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
        verdict = (
            "ok" if row.ok else "[red]exceeded[/]" if row.value > row.limit else "[red]lower the budget[/]"
        )
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
