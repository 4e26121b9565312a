"""Skip proofs that are functions of files while nothing that decides them has changed.

    pytestmark = pytest.mark.proof("models/laneformer/engine/cuda/*.cu*")

A test so marked takes minutes and asks the same question of the same bytes each time: machine code, an emulator,
sanitizers, a model checker. Its key is the SHA-256 of its name, of every Python file of this repository that its
module reaches by imports (conftest files included), of the files that the mark's patterns match, and of the
compilers, wheels, processor flags and the switch below. When it has passed, its key is left in the cache; the next
test with this key skips itself and says since when it is proved. Failures and skips leave nothing.

    pytestmark = pytest.mark.proof(*CORE_SOURCES, programs=True)

A module so marked runs programs that it compiles from these files, and uses no fixture of a conftest file and none of
the engine's Python: its conftest files, and what they import, do not count.

Proofs rotate (tiers.py).

The cache is ${LANEFORMER_CACHE:-~/.cache/laneformer}/ci. `make nightly` starts from an empty one.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.check.imports import PACKAGES, list_imports

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("LANEFORMER_CACHE") or Path.home() / ".cache/laneformer") / "ci"
# every other package lies in ROOT
ROOTS = {"laneformer": ROOT / "models"}
OURS = {*PACKAGES, "tests"}
COMPILERS = ("g++", "gcc", "aarch64-linux-gnu-g++", "qemu-aarch64-static")
WHEELS = ("numpy", "torch", "triton", "cuda-bindings", "nvidia-cuda-nvrtc", "nanobind", "pytest")
# what is compiled beside the Python modules that a test reaches
KERNEL_SOURCES = (
    "models/laneformer/engine/cuda/*.cu*",
    "models/laneformer/engine/sampling.h",
    "tests/laneformer/cuda/*.[ch]*",
)
CORE_SOURCES = (
    "CMakeLists.txt",
    "models/laneformer/engine/cpu/csrc/**/*",
    "models/laneformer/engine/schedule/*",
    "models/laneformer/engine/sampling.h",
    "tests/laneformer/engine/*.cpp",
    "tests/laneformer/engine/*.h",
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"proof(*patterns): {(__doc__ or '').splitlines()[0]}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if mark := item.get_closest_marker("proof"):
        name, module = item.nodeid.split("@tests/")[0], Path(str(item.path))
        key = key_of(name, module, mark.args, programs=mark.kwargs.get("programs", False))
        item.stash[KEY] = key
        proved = CACHE / "proofs" / key
        if proved.exists():
            pytest.skip(f"proved: {key[:12]} on {proved.read_text().strip()}")


KEY = pytest.StashKey[str]()
PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if KEY in item.stash:
        item.stash[PASSED] = item.stash.get(PASSED, True) and report.passed
        if report.when == "teardown" and item.stash[PASSED]:
            leave(item.stash[KEY])
    return report


def leave(key: str) -> None:
    # one rename: another process never sees a half written key
    (CACHE / "proofs").mkdir(parents=True, exist_ok=True)
    partial = CACHE / "proofs" / f".{key}.{os.getpid()}"
    partial.write_text(time.strftime("%Y-%m-%d\n"))
    partial.rename(CACHE / "proofs" / key)


def key_of(name: str, module: Path, patterns: tuple[str, ...], programs: bool = False) -> str:
    """Return the hash of all that decides a test; ValueError for a pattern that matches no file."""
    whole = hashlib.sha256(f"{name}\n{surroundings()}\n".encode())
    for path in sorted({*list_reached(module, programs), *match_patterns(patterns)}):
        whole.update(f"{path.relative_to(ROOT)} {content_hash(path)}\n".encode())
    return whole.hexdigest()


def match_patterns(patterns: tuple[str, ...]) -> set[Path]:
    matches: set[Path] = set()
    for pattern in patterns:
        files = {path for path in ROOT.glob(pattern) if path.is_file()}
        if not files:
            raise ValueError(f"the proof's input {pattern!r} matches no file below {ROOT}")
        matches |= files
    return matches


@functools.cache
def content_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@functools.cache
def surroundings() -> str:
    """Return versions of compilers and wheels, the processor's flags, and BELOW_AMX."""
    info = (
        Path("/proc/cpuinfo").read_text()
        if Path("/proc/cpuinfo").exists()
        else platform.processor()
    )
    flags = re.search("^(flags|Features).*", info, re.MULTILINE)
    below = f"BELOW_AMX={os.environ.get('BELOW_AMX', '')}"
    lines = [platform.platform(), sys.version, flags[0] if flags else info, below]
    for name in COMPILERS:
        path = shutil.which(name)
        outcome = (
            subprocess.run([path, "--version"], capture_output=True, text=True) if path else None
        )
        lines.append(f"{name}: {outcome.stdout.partition(chr(10))[0] if outcome else 'missing'}")
    wheels = {wheel.name: wheel.version for wheel in importlib.metadata.distributions()}
    return "\n".join([*lines, *(f"{name}: {wheels.get(name, 'missing')}" for name in WHEELS)])


@functools.cache
def list_reached(module: Path, programs: bool = False) -> frozenset[Path]:
    """Return the module, its conftest files unless `programs`, and all files here they import."""
    todo, reached = [module, *([] if programs else list_conftests(module))], set()
    while todo:
        path = todo.pop()
        if path not in reached:
            reached.add(path)
            todo += list_imported_files(path)
    return frozenset(reached)


def list_conftests(module: Path) -> list[Path]:
    folders = [folder for folder in module.parents if folder.is_relative_to(ROOT)]
    return [folder / "conftest.py" for folder in folders if (folder / "conftest.py").exists()]


@functools.cache
def list_imported_files(path: Path) -> tuple[Path, ...]:
    """Return the repository files that one file imports, lazily and for typing included."""
    base = ROOTS["laneformer"] if path.is_relative_to(ROOTS["laneformer"]) else ROOT
    package = ".".join(path.relative_to(base).parent.parts)
    names: set[str] = set()
    # a module's packages run first
    for module, name in list_imports(ast.parse(path.read_text(encoding="utf-8")), package):
        names |= {module, f"{module}.{name}"}
    return tuple(file for name in names for file in files_of(name))


@functools.cache
def files_of(name: str) -> tuple[Path, ...]:
    """Return the file of a dotted name and its packages' `__init__.py`; () outside this tree."""
    parts = name.split(".")
    if parts[0] not in OURS:
        return ()
    files, folder = [], ROOTS.get(parts[0], ROOT)
    for part in parts:
        candidates = (folder / f"{part}.py", folder / part / "__init__.py")
        files += [path for path in candidates if path.is_file()]
        folder = folder / part
    return tuple(files)
