"""Tests of proofs: what changes a key, and that only a test that passed is skipped next time."""

from __future__ import annotations

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
FILES = {
    "tests/__init__.py": "",
    "tests/helper.py": "RIGHT = 'right'\n",
    "tests/test_it.py": TEST,
    "tests/conftest.py": "pytest_plugins = ['tests.tiers', 'tests.proofs']\n",
    "kernels/a.cu": "int a;\n",
    "pytest.ini": "[pytest]\n",
}


@pytest.fixture
def checkout(pytester, monkeypatch):
    # one proof, its helper and its input
    for name, text in FILES.items():
        (pytester.path / name).parent.mkdir(exist_ok=True)
        (pytester.path / name).write_text(text)
    monkeypatch.setattr(proofs, "ROOT", pytester.path)
    monkeypatch.setattr(proofs, "ROOTS", {"laneformer": pytester.path / "models"})
    return pytester.path


def key(checkout, programs=False):
    for cached in (
        proofs.content_hash,
        proofs.list_reached,
        proofs.list_imported_files,
        proofs.files_of,
    ):
        cached.cache_clear()
    return proofs.key_of("test_it", checkout / "tests/test_it.py", ("kernels/*.cu",), programs)


def test_a_proof_is_not_repeated_and_nothing_else_is_skipped(checkout, pytester, monkeypatch):
    for name in ("proofs", "tiers"):
        (checkout / f"tests/{name}.py").write_text((ROOT / f"tests/{name}.py").read_text())
    monkeypatch.setenv("LANEFORMER_CACHE", str(checkout / "cache"))
    # of the run that this test belongs to
    monkeypatch.delenv("ROTATE_UNTIL", raising=False)
    # whose tools the plugin uses
    monkeypatch.setenv("PYTHONPATH", f"{checkout}:{ROOT}")
    for outcomes in (
        {"passed": 1, "failed": 1, "skipped": 1},
        {"passed": 0, "failed": 1, "skipped": 2},
    ):
        pytester.runpytest_subprocess("-p", "no:cacheprovider", "tests/test_it.py").assert_outcomes(
            **outcomes
        )


@pytest.mark.parametrize("programs", [False, True])
def test_one_changed_byte_of_an_input_is_another_proof(checkout, programs):
    # compiled programs depend on no conftest file
    for name in (
        "kernels/a.cu",
        "tests/helper.py",
        "tests/test_it.py",
        "tests/conftest.py",
        "pytest.ini",
    ):
        before = key(checkout, programs)
        (checkout / name).write_text(FILES[name] + "\n")
        same = name == "pytest.ini" or (programs and name == "tests/conftest.py")
        assert (key(checkout, programs) == before) == same, name


def test_an_input_that_matches_nothing_is_an_error(checkout):
    (checkout / "kernels/a.cu").unlink()
    with pytest.raises(ValueError, match="matches no file"):
        key(checkout)


def test_imports_are_followed_through_packages_and_in_functions():
    module = ROOT / "tests/laneformer/cuda/test_machine_code.py"
    names = {str(path.relative_to(ROOT)) for path in proofs.list_reached(module)}
    assert {
        "tests/conftest.py",
        "tests/laneformer/cuda/sass.py",
        "models/laneformer/config.py",
    } <= names
    assert "models/laneformer/engine/cuda/planning.py" in names
    assert "tests/train/runs.py" not in names


def test_every_proof_reaches_what_it_names():
    # patterns of each mark match, and sources beside the imported modules are inputs
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.proof(" in text and path.parent.name == "cuda":
            assert "KERNEL_SOURCES" in text, (
                f"{path} imports the CUDA engine: its kernels are inputs"
            )
