"""The import arrows between packages, held by reading every import statement."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = ("laneformer", "data_mixtures", "train", "evals", "tools")
MAY_IMPORT = {
    "laneformer": set(),
    "data_mixtures": set(),
    "train": {"laneformer", "data_mixtures"},
    "evals": {"laneformer", "data_mixtures"},
    "tools": {"laneformer", "data_mixtures", "train", "evals"},
}
# inside laneformer: what a part may use of the others, and the heavy libraries that only some parts may touch
INSIDE = {
    "config": set(),
    "provenance": set(),
    "model": {"config"},
    "hf": {"config", "model"},
    "titan": {"config", "model"},
    "engine": {"config"},
    "engine/cuda": {"config", "model", "engine"},
    "cli": {"config", "engine"},
}
ONLY_IN = {
    "torchtitan": {"titan"},
    "transformers": {"hf"},
    "torch": {"model", "hf", "titan", "engine/cuda", "engine/device.py"},
}


def imports(path: Path, root: Path) -> set[str]:
    """Dotted names that a file imports, relative ones made absolute under `root`, lazy and typing ones included."""
    package = list(path.relative_to(root).with_suffix("").parts[:-1])
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *((node.module or "").split(".") if node.module else [])])
            found |= {f"{module}.{alias.name}" if not node.module else module for alias in node.names}
    return found


def files(package: str) -> list[tuple[Path, Path]]:
    root = ROOT / "models" if package == "laneformer" else ROOT
    return [(path, root) for path in sorted((root / package).rglob("*.py"))]


@pytest.mark.parametrize("package", OURS)
def test_arrows_between_packages(package: str) -> None:
    assert files(package), f"{package} has no files"
    for path, root in files(package):
        used = {name.split(".")[0] for name in imports(path, root)} & set(OURS) - {package}
        assert used <= MAY_IMPORT[package], f"{path.relative_to(ROOT)} imports {used - MAY_IMPORT[package]}"
        assert not any(name.startswith("models.") for name in imports(path, root)), path


def test_arrows_inside_laneformer() -> None:
    for path, root in files("laneformer"):
        parts = path.relative_to(root / "laneformer").parts
        part = parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        if parts[:2] == ("engine", "cuda"):
            part = "engine/cuda"
        names = imports(path, root)
        used = {name.split(".")[1] for name in names if name.startswith("laneformer.")} - {part}
        assert used <= INSIDE[part], f"{'/'.join(parts)} imports {used - INSIDE[part]}"
        for library, allowed in ONLY_IN.items():
            if any(name.split(".")[0] == library for name in names):
                assert {part, "/".join(parts)} & allowed, f"{'/'.join(parts)} imports {library}"


def test_nothing_imports_tools_and_the_check_can_fail(tmp_path: Path) -> None:
    planted = tmp_path / "laneformer" / "engine" / "bad.py"
    planted.parent.mkdir(parents=True)
    planted.write_text("from ..titan import spec\nimport tools.demo\nfrom .. import model\n")
    assert imports(planted, tmp_path) == {"laneformer.titan", "tools.demo", "laneformer.model"}
