"""Find which of our modules uses which: arrows between packages and circles between modules."""

from __future__ import annotations

import ast
import importlib.util
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
    # laneformer says what tokenizers its export takes
    "data_mixtures": {"records", "laneformer"},
    "train": GROUND,
    "evals": GROUND,
    "tools": set(PACKAGES),
    "examples": {"data_mixtures", "records"},
}
# whose modules a package may start as processes, beyond those that it may import: training starts
# the watcher of its evaluations, a recipe names the program that writes its text
MAY_START = {"train": "evals.watch", "data_mixtures": "examples."}
# strings that name a module: after `-m`, a dotted name alone (a.b or a.b:attribute), the start of
# an f-string
NAMED = re.compile(r'"-m",\s*"(\w+)"|"(\w+(?:\.\w+)+)(?::\w+)?"|f"(\w+)\.[\w.]*\{')


@dataclass(frozen=True, order=True)
class Edge:
    """`source` uses `target`, both dotted module names; `process` is by a string, not an import."""

    source: str
    target: str
    process: bool = False


def list_modules(root: Path) -> dict[str, Path]:
    """Return every module of ours by its dotted name; a package has its folder's name."""
    paths = {}
    for package, folder in PACKAGES.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = [package, *path.relative_to(root / folder).with_suffix("").parts]
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def package_of(module: str, path: Path) -> str:
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def list_imports(tree: ast.Module, package: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name or "") of every import; relative ones resolved against `package`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from ((module, alias.name) for alias in node.names)


def find_names(text: str) -> set[str]:
    """Return modules and other dotted names in the strings of a Python or TOML file."""
    # a module that a comment mentions is not used
    code = re.sub(r"(?m)#.*$", "", text).replace("'", '"')
    return {"".join(groups) for groups in NAMED.findall(code)}


def find_edges(root: Path) -> set[Edge]:
    """Return all edges between two of our modules; a TOML file counts as its package."""
    # imports (lazy ones and those for typing, too), and strings that name a process (`"-m", "evals.watch"`)
    # or a plugin (`custom_import`)
    ours = list_modules(root)
    arrows = set()
    for module, path in ours.items():
        text = path.read_text(encoding="utf-8")
        for target, name in list_imports(ast.parse(text, str(path)), package_of(module, path)):
            # `from a import b` uses the module a.b if there is one, else a
            arrows.add(Edge(module, f"{target}.{name}" if f"{target}.{name}" in ours else target))
        for name in ours.keys() & find_names(text):
            # `-m a` runs a.__main__
            command = f"{name}.__main__"
            arrows.add(Edge(module, command if command in ours else name, process=True))
    for owner, folder in PACKAGES.items():
        for path in sorted((root / folder).rglob("*.toml")):
            names = ours.keys() & find_names(path.read_text(encoding="utf-8"))
            arrows |= {Edge(owner, name, process=True) for name in names}
    return {
        edge
        for edge in arrows
        if edge.source != edge.target and edge.target.split(".")[0] in PACKAGES
    }


def only_starts(edge: Edge) -> bool:
    """Return whether MAY_START allows `edge`, which is then no arrow of the structure."""
    allowed = MAY_START.get(edge.source.split(".")[0])
    return edge.process and allowed is not None and edge.target.startswith(allowed)


def find_forbidden_edges(arrows: set[Edge]) -> list[str]:
    """Return the edges that leave a package for one which it may not use."""
    forbidden = []
    for edge in sorted(arrows):
        source, target = edge.source.split(".")[0], edge.target.split(".")[0]
        if target not in {source, *MAY_USE[source]} and not only_starts(edge):
            forbidden.append(
                f"{edge.source} {'names' if edge.process else 'imports'} {edge.target}"
            )
    return forbidden


def find_folder_edges(arrows: set[Edge]) -> set[Edge]:
    """Return each edge between the neighbours (files or folders of one parent) that it connects.

    Circles of these are circles of folders: `a.b.x -> a.c.y` and `a.c.z -> a.b.w` make
    `a.b <-> a.c`, though no module reaches itself.
    """
    neighbours = set()
    for edge in arrows:
        source, target = edge.source.split("."), edge.target.split(".")
        # names that both paths begin with: the edge connects the first two that differ
        shared = 0
        while source[shared:][:1] == target[shared:][:1] != []:
            shared += 1
        if shared < min(len(source), len(target)) and not only_starts(edge):
            neighbours.add(Edge(".".join(source[: shared + 1]), ".".join(target[: shared + 1])))
    return neighbours


def find_circles(arrows: set[Edge]) -> list[list[str]]:
    """Return sorted groups of modules that all reach each other (strongly connected components)."""
    # here: a plugin of the tests reads imports at every start
    import networkx

    graph = networkx.DiGraph((edge.source, edge.target) for edge in arrows)
    groups = networkx.strongly_connected_components(graph)
    return sorted(sorted(group) for group in groups if len(group) > 1)
