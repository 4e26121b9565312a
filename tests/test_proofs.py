"""Proofs: what changes a key, and that only a test that has passed is skipped the next time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import proofs

ROOT = Path(__file__).resolve().parents[1]
TEST = """
import pytest
from tests import helper

@pytest.mark.proof("kernels/*.cu")
@pytest.mark.parametrize("name", ["right", "wrong", "skipped"])
def test_it(name):
    if name == "skipped":
        pytest.skip("not here")
    assert name == helper.RIGHT
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of one proof, its helper and its input, with a cache of its own."""
    files = {
        "tests/__init__.py": "", "tests/helper.py": "RIGHT = 'right'\n", "tests/test_it.py": TEST,
        "tests/conftest.py": "pytest_plugins = ['tests.proofs']\n", "kernels/a.cu": "int a;\n",
        "pytest.ini": "[pytest]\n",
        "tests/proofs.py": (ROOT / "tests/proofs.py").read_text(),
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def outcomes(checkout: Path) -> str:
    """The letters of the three tests, in order."""
    environment = {**os.environ, "LANEFORMER_CACHE": str(checkout / "cache"), "PYTHONPATH": str(checkout)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "tests/test_it.py",
    ]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout[:1] in tuple(".FsE"), done.stdout + done.stderr
    return done.stdout.split()[0]


def test_a_proof_is_not_repeated_and_nothing_else_is_skipped(checkout: Path) -> None:
    assert outcomes(checkout) == ".Fs"
    assert outcomes(checkout) == "sFs"


@pytest.mark.parametrize(
    "changed", ["kernels/a.cu", "tests/helper.py", "tests/test_it.py", "tests/conftest.py"]
)
def test_one_changed_byte_is_another_proof(checkout: Path, changed: str) -> None:
    assert outcomes(checkout) == ".Fs"
    with (checkout / changed).open("a") as file:
        file.write("\n")
    assert outcomes(checkout) == ".Fs"


@pytest.mark.parametrize(("changed", "letters"), [("tests/conftest.py", "sFs"), ("kernels/a.cu", ".Fs")])
def test_programs_alone_do_not_depend_on_conftest_files(checkout: Path, changed: str, letters: str) -> None:
    test = checkout / "tests/test_it.py"
    test.write_text(TEST.replace('"kernels/*.cu"', '"kernels/*.cu", programs=True'))
    assert outcomes(checkout) == ".Fs"
    with (checkout / changed).open("a") as file:
        file.write("\n")
    assert outcomes(checkout) == letters


def test_an_input_that_matches_nothing_is_an_error(checkout: Path) -> None:
    (checkout / "kernels/a.cu").unlink()
    assert "E" in outcomes(checkout)


def test_imports_are_followed_through_packages_and_in_functions() -> None:
    module = ROOT / "tests/laneformer/cuda/test_machine_code.py"
    names = {str(path.relative_to(ROOT)) for path in proofs.reached(module)}
    assert {"tests/conftest.py", "tests/laneformer/cuda/sass.py", "models/laneformer/config.py"} <= names
    assert "models/laneformer/engine/cuda/planning.py" in names
    assert "tests/train/runs.py" not in names


def test_every_proof_reaches_what_it_names() -> None:
    """The patterns of each mark match, and sources beside the imported modules are among the inputs."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.proof(" in text and path.parent.name == "cuda":
            assert "KERNEL_SOURCES" in text, f"{path} imports the CUDA engine: its kernels are inputs"
