"""Counts the structure of the source against its limits; exit status 1 when one is broken.

    python -m tools.check.structure [--root DIR]

Hops are verified: every function of the chains below must exist and call the next one (in a lambda of its
own, too). "Source" is what is compiled or interpreted outside tests/ and docs/.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from .imports import broken_arrows, circles, edges

ROOT = Path(__file__).resolve().parents[2]
KERNELS = {".cu", ".cuh"}
SUFFIXES = {".py", ".pyi", ".cpp", ".h", *KERNELS}
NOT_SOURCE = {"tests", "docs", "build", "dist", "runs", "data"}
FILE_LINES, KERNEL_LINES, FUNCTION_LINES = 400, 600, 60
SAMPLING_RULE = re.compile(r"\bmin_?p\b", re.IGNORECASE)  # followed through every file that knows it

Chain = list[tuple[str, str, str]]  # (file or installed module, function, its call of the next function)
TRAINING: Chain = [
    ("train/__main__.py", "main", "titan_main"),
    ("torchtitan.train", "main", "train"),
    ("train/trainer.py", "LaneformerTrainer.train", "super().train"),
    ("torchtitan.train", "Trainer.train", "train_step"),
    ("train/trainer.py", "LaneformerTrainer.train_step", "model"),
    ("models/laneformer/titan/spec.py", "TitanLaneformer.forward", ""),
]
DECODE: Chain = [
    ("models/laneformer/engine/engine.py", "Engine.generate", "_start"),
    ("models/laneformer/engine/engine.py", "Engine._start", "decoder.start"),
    ("models/laneformer/engine/cpu/csrc/requests.cpp", "Decoder::start", "serve"),
    ("models/laneformer/engine/cpu/csrc/decoder.cpp", "Decoder::serve", ""),
]


@dataclass
class Measure:
    """One row of the table; `found` says what was counted, or what breaks the limit."""

    name: str
    value: int
    limit: int
    found: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.value <= self.limit


# --- files and functions
# ------------------------------------------------------------------------------------------


def sources(root: Path) -> dict[Path, str]:
    """Text of every source file by its path below `root`."""
    tops = [
        top for top in sorted(root.iterdir()) if top.name not in NOT_SOURCE and not top.name.startswith(".")
    ]
    files = [file for top in tops for file in ([top] if top.is_file() else sorted(top.rglob("*")))]
    return {
        f.relative_to(root): f.read_text(encoding="utf-8")
        for f in files
        if f.suffix in SUFFIXES and f.is_file()
    }


def is_docstring_only(path: Path, text: str) -> bool:
    """An `__init__.py` that makes a folder a package and holds no code."""
    return path.name == "__init__.py" and all(
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in ast.parse(text).body
    )


def is_kernel(path: Path) -> bool:
    return path.suffix in KERNELS or path.parent.name == "kernels"


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
    """Definitions by their braces, nested lambdas included; comments, strings and
    directives are blanked first.
    """
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


# --- sizes
# --------------------------------------------------------------------------------------------------------


def longest(name: str, lengths: dict[str, int], limit: int) -> Measure:
    return Measure(
        name, max(lengths.values(), default=0), limit, [f"{k}: {n}" for k, n in lengths.items() if n > limit]
    )


def sizes(texts: dict[Path, str]) -> list[Measure]:
    """Rooms are counted elsewhere; here lines of files and functions, and both totals."""
    lines = {path: text.count("\n") for path, text in texts.items()}
    bodies = {
        f"{p}: {name}": body.count("\n") + 1 for p, text in texts.items() for name, body in functions(p, text)
    }
    return [
        longest(
            "lines of the longest file", {str(p): n for p, n in lines.items() if not is_kernel(p)}, FILE_LINES
        ),
        longest(
            "lines of the longest kernel file",
            {str(p): n for p, n in lines.items() if is_kernel(p)},
            KERNEL_LINES,
        ),
        longest("lines of the longest function", bodies, FUNCTION_LINES),
        Measure("source lines", sum(lines.values()), 55_000),  # not to grow unnoticed (decision 0025)
        Measure("source files", sum(not is_docstring_only(path, text) for path, text in texts.items()), 316),
    ]


# --- knowledge that should stand once
# -----------------------------------------------------------------------------


def functions_that(
    texts: dict[Path, str], does: Callable[[ast.AST], bool], but: tuple[str, ...] = ()
) -> list[str]:
    """`file: function` of every innermost Python function for which `does(its syntax tree)`."""
    found = []
    for path, text in texts.items():
        if path.suffix == ".py" and path.parts[0] not in but and re.search("loads|ConfigManager", text):
            bodies = [(name, ast.parse(textwrap.dedent(body))) for name, body in functions(path, text)]
            names = [name for name, tree in bodies if does(tree)]
            inner = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
            found += [f"{path}: {name}" for name in inner]
    return found


def reads_json_lines(tree: ast.AST) -> bool:
    """Whether `json.loads` gets lines of a file: those of a loop, a parameter `line`, or the last one."""
    assigned = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assigned[node.targets[0].id] = ast.unparse(node.value)

    def is_lines_of_a_file(node: ast.expr) -> bool:
        text = ast.unparse(node)
        text += " ".join(assigned.get(name.id, "") for name in ast.walk(node) if isinstance(name, ast.Name))
        return bool(
            re.search(r"lines|open\(|file|split", text) and not re.search(r"stdin|stdout|getvalue", text)
        )

    targets = {arg.arg for node in ast.walk(tree) if isinstance(node, ast.arguments) for arg in node.args} & {
        "line"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.comprehension) and is_lines_of_a_file(node.iter):
            targets |= {name.id for name in ast.walk(node.target) if isinstance(name, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "json.loads":
            argument = node.args[0]
            names = {name.id for name in ast.walk(argument) if isinstance(name, ast.Name)}
            if names & targets or (isinstance(argument, ast.Subscript) and is_lines_of_a_file(argument)):
                return True
    return False


def reads_job_file(tree: ast.AST) -> bool:
    """Whether a function parses TOML itself or has TorchTitan parse it."""
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return bool(called & {"tomllib.load", "tomllib.loads", "ConfigManager"})


# --- hops
# ---------------------------------------------------------------------------------------------------------


def broken_hops(root: Path, chain: Chain) -> list[str]:
    """Where a chain does not hold: no such function, no such call, or a call of another function
    than the next one.
    """
    broken = []
    for (place, name, call), (_, following, _) in zip(chain, [*chain[1:], ("", "", "")], strict=True):
        path = root / place if "/" in place else installed(place)
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        own = re.split(r"\.|::", name)[-1] + "("  # its head is no call of itself
        bodies = [body.replace(own, "(", 1) for found, body in functions(path, text) if found == name]
        if not bodies:
            broken.append(f"{place} has no function {name}")
        elif call and not any(re.search(rf"(?<!\w){re.escape(call)}\(", body) for body in bodies):
            broken.append(f"{place}: {name} does not call {call}")
        last, target = re.split(r"\.|::|->", call)[-1], re.split(r"\.|::", following)[-1]
        if call and last != target and target != "forward" and f"{target} as {call}" not in text:
            broken.append(f"{place}: {call} is not {following}")
    return broken


def installed(module: str) -> Path:
    """The file of an installed module, which is not imported."""
    package, *parts = module.split(".")
    origin = getattr(importlib.util.find_spec(package), "origin", None) or ""
    return Path(origin).parent.joinpath(*parts).with_suffix(".py")


def hops(root: Path, name: str, chain: Chain, limit: int) -> Measure:
    """The length of a chain; one that does not hold has no length and breaks the limit."""
    broken = broken_hops(root, chain)
    path = [f"{place}: {function}" for place, function, _ in chain]
    return Measure(name, 99 if broken else len(chain) - 1, limit, broken or path)


# --- the table
# ----------------------------------------------------------------------------------------------------


def measures(root: Path = ROOT) -> list[Measure]:
    """Every measure with its limit."""
    texts, found = sources(root), edges(root)
    groups, arrows = [" <-> ".join(group) for group in circles(found)], broken_arrows(found)
    rooms = sorted({path.parts[1] for path in texts if path.parts[0] == "tools"} - {"__init__.py"})
    json_lines = functions_that(texts, reads_json_lines)
    job_files = functions_that(
        texts, reads_job_file, but=("data_mixtures", "examples")
    )  # their TOML is no job
    rule = [
        str(path)
        for path, text in texts.items()
        if SAMPLING_RULE.search(text) and path.parts[:2] != ("tools", "check")
    ]
    return [
        Measure("import circles", len(groups), 0, groups),
        Measure("arrows against the plan", len(arrows), 0, arrows),
        Measure("rooms in tools/", len(rooms), 12, rooms),
        hops(root, "hops of a training step", TRAINING, 5),
        hops(root, "hops to the decode loop", DECODE, 3),
        *sizes(texts),
        Measure("readers of JSON lines", len(json_lines), 1, json_lines),
        Measure("readers of job files", len(job_files), 2, job_files),
        Measure("files that know a sampling rule", len(rule), 5, rule),
    ]


def main(root: Path = ROOT) -> None:
    """Count the structure of the source against its limits.

    Args:
        root: Checkout to count.
    """
    console = Console(soft_wrap=True)
    table = Table("measure", "value", "limit", "")
    rows = measures(root)
    for row in rows:
        table.add_row(row.name, f"{row.value:,}", f"{row.limit:,}", "ok" if row.ok else "[red]broken[/]")
    console.print(table)
    for row in rows:
        if not row.ok and row.found:
            console.print(f"\n{row.name}:", *row.found, sep="\n  ", markup=False, highlight=False)
    raise SystemExit(any(not row.ok for row in rows))


if __name__ == "__main__":
    tyro.cli(main, prog="python -m tools.check structure")
