"""Which module of ours uses which: arrows between packages and circles between modules.

An edge goes from a module to each module of ours that it imports (lazily and for typing, too) or names in a
string: a process (`-m evals.watch`), a plugin (`custom_import`) or a dotted name. Messages and docstrings
are prose: no edge.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = {
    "records": "records",
    "laneformer": "models/laneformer",
    "data_mixtures": "data_mixtures",
    "train": "train",
    "evals": "evals",
    "tools": "tools",
    "examples": "examples",
}
GROUND = {"records", "laneformer", "data_mixtures"}
MAY_USE: dict[str, set[str]] = {
    "records": set(),
    "laneformer": set(),
    "data_mixtures": {"records"},
    "train": GROUND,
    "evals": GROUND,
    "tools": set(PACKAGES),
    "examples": {"data_mixtures", "records"},
}
# a package that may start a module which it may not import: a recipe names the program that writes its text
PROCESSES = {
    ("train", "evals.watch"), ("data_mixtures", "examples.corpus"), ("data_mixtures", "examples.wheels_corpus"),
}  # fmt: skip
PLUGIN_KEYS = ("custom_import", "custom_config_module")
AFTER = {"-m", *(f"--{section}.{key}" for section in ("job", "experimental") for key in PLUGIN_KEYS)}
DOTTED = r"(\w+(?:\.\w+)+)(?::\w+)?"  # a.b or a.b:attribute


@dataclass(frozen=True, order=True)
class Edge:
    """`source` uses `target`, both dotted names of modules; process: by a string, not by an import."""

    source: str
    target: str
    process: bool = False


def modules(root: Path) -> dict[str, Path]:
    """Every module of ours by its dotted name; a package goes by the name of its folder."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = [package, *path.relative_to(root / folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(tree: ast.Module, package: list[str]) -> Iterator[tuple[str, str]]:
    """(module, name or "") of every import statement; relative ones are resolved against `package`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)


def named(tree: ast.Module) -> Iterator[str]:
    """Strings that may name a module: after `-m` or a plugin option, a dotted name alone, the
    start of an f-string.
    """
    for node in ast.walk(tree):
        values: list[ast.expr] = getattr(node, "elts", []) or (
            node.args if isinstance(node, ast.Call) else []
        )
        for before, value in itertools.pairwise(values):
            if isinstance(before, ast.Constant) and before.value in AFTER and isinstance(value, ast.Constant):
                yield str(value.value)
        if isinstance(node, ast.JoinedStr) and node.values and isinstance(node.values[0], ast.Constant):
            if start := re.match(r"(\w+)\.[\w.]*$", str(node.values[0].value)):  # f"evals.{name}"
                yield start[1]
        elif isinstance(node, ast.Constant) and (name := re.fullmatch(DOTTED, str(node.value))):
            yield name[1]


def edges(root: Path) -> set[Edge]:
    """All edges between two different modules of ours; a TOML file counts as its package."""
    ours = modules(root)
    found = set()
    for module, path in ours.items():
        package = module.split(".")[: None if path.name == "__init__.py" else -1]
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        for target, name in imported(tree, package):
            found.add(Edge(module, f"{target}.{name}" if f"{target}.{name}" in ours else target))
        for name in named(tree):
            if name in ours:
                found.add(
                    Edge(module, f"{name}.__main__" if f"{name}.__main__" in ours else name, process=True)
                )
    for owner, folder in PACKAGES.items():
        for path in sorted((root / folder).rglob("*.toml")):
            values = re.findall(rf'"{DOTTED}"', re.sub(r"(?m)#.*$", "", path.read_text(encoding="utf-8")))
            found |= {Edge(owner, name, process=True) for name in values if name in ours}
    return {edge for edge in found if edge.source != edge.target and edge.target.split(".")[0] in PACKAGES}


def is_allowed_process(edge: Edge) -> bool:
    """Whether PROCESSES lists what `edge.source` starts."""
    return edge.process and (edge.source.split(".")[0], edge.target) in PROCESSES


def broken_arrows(found: set[Edge]) -> list[str]:
    """The edges that leave a package for one which it may not use."""
    broken = []
    for edge in sorted(found):
        source, target = edge.source.split(".")[0], edge.target.split(".")[0]
        if target not in {source, *MAY_USE[source]} and not is_allowed_process(edge):
            broken.append(f"{edge.source} {'names' if edge.process else 'imports'} {edge.target}")
    return broken


def folder_edges(found: set[Edge]) -> set[Edge]:
    """Each edge between the two neighbours, files or folders of one parent folder, that it connects.

    A circle of these is a circle of folders: `a.b.x -> a.c.y` and `a.c.z -> a.b.w` make `a.b <-> a.c`, though
    no module reaches itself.
    """
    neighbours = set()
    for edge in found:
        source, target = edge.source.split("."), edge.target.split(".")
        shared = sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(source, target, strict=False))
        )
        if shared < min(len(source), len(target)) and not is_allowed_process(edge):
            neighbours.add(Edge(".".join(source[: shared + 1]), ".".join(target[: shared + 1])))
    return neighbours


def circles(found: set[Edge]) -> list[list[str]]:
    """Groups of modules that all reach each other (strongly connected components, Tarjan), each sorted."""
    after: dict[str, list[str]] = {}
    for edge in sorted(found):
        after.setdefault(edge.source, []).append(edge.target)
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups = []

    def visit(module: str) -> None:
        number[module] = low[module] = len(number)
        stack.append(module)
        for target in after.get(module, []):
            if target not in number:
                visit(target)
            if target in stack:
                low[module] = min(low[module], low[target])
        if low[module] == number[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for module in sorted(after):
        if module not in number:
            visit(module)
    return groups
