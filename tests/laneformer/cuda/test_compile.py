"""The kernels compile for real GPUs on a machine without one, and their cubins are kept.

NVRTC needs neither a GPU nor a toolkit. Whether the code is right, the emulator's tests say; here:
that it is accepted for every generation, with how many registers, and what the cache of cubins does
when things go wrong.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from laneformer.config import LaneformerConfig
from laneformer.engine.cuda import compile as compiling
from laneformer.engine.cuda.compile import FOLDER, compile_cubin
from laneformer.engine.cuda.geometry import H200, Geometry
from laneformer.engine.cuda.nvrtc import compilers
from laneformer.engine.cuda.planning import plan
from tests.laneformer.cuda.harness import KERNELS, small_config
from tests.proofs import CACHE, KERNEL_SOURCES

CUBINS = CACHE / "cubins"  # shared by all tests of real kernels: each is named by all that decides it
proof = pytest.mark.proof(*KERNEL_SOURCES)
pytestmark = pytest.mark.skipif(
    not compilers(), reason="needs the cuda extra: pip install 'laneformer[cuda]'"
)


def small(**shape: Any) -> Geometry:
    return plan(
        small_config(num_hidden_layers=2, swa_layers=(0,)),
        "bf16",
        H200,
        **{"warps": 2, "blocks_per_lane": 4, **shape},
    )


@proof
@pytest.mark.parametrize(("version", "architecture"), [("passes", "sm_80"), ("graph", "sm_100a")])
def test_a_small_model_compiles(version: str, architecture: str) -> None:
    """An ELF file with every kernel that the host asks for; other architectures: test_machine_code.py."""
    cubin = compile_cubin(version, small(), architecture, CUBINS)
    assert cubin.startswith(b"\x7fELF")
    for kernel in KERNELS[version]:
        assert f".text.{kernel}".encode() in cubin


@proof
@pytest.mark.parametrize(
    "variant", [{"dtype": "fp16", "devices": 2}, {"wide_exchanges": True, "chunk_bytes": 512}], ids=str
)
def test_variants_compile(variant: dict[str, Any]) -> None:
    config = small_config(num_hidden_layers=2, swa_layers=(0,), replicated_rmsn_scale=False)
    geometry = plan(config, machine=H200, **{"dtype": "bf16", "warps": 2, "blocks_per_lane": 4, **variant})
    compile_cubin("passes", geometry, "sm_90a", CUBINS)


@proof
def test_passes_of_the_2b_model_compile_for_the_newest_cards() -> None:
    """Older ones, and registers: test_machine_code.py."""
    geometry = plan(LaneformerConfig.from_flavor("2b"), "bf16", H200, columns=4)
    assert b".text.pass" in compile_cubin("passes", geometry, "sm_120a", CUBINS)


# ---- the cache ----


class Compiler:
    """Stands for NVRTC in the cache's tests: counts, and makes a cubin of the source."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.runs, self.version = 0, (13, 0)
        monkeypatch.setattr(compiling, "compiler_for", lambda architecture, driver: self)

    def compile(self, source: str, architecture: str, includes: Any) -> bytes:
        self.runs += 1
        return source.encode() + architecture.encode()


def test_a_cubin_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again for anything that decides it; nothing else is left in the folder."""
    compiler = Compiler(monkeypatch)
    first = compile_cubin("passes", small(), "sm_90a", tmp_path)
    assert compile_cubin("passes", small(), "sm_90a", tmp_path) == first
    assert compiler.runs == 1
    compile_cubin("passes", small(blocks_per_lane=3), "sm_90a", tmp_path)
    compile_cubin("graph", small(), "sm_90a", tmp_path)
    compile_cubin("passes", small(), "sm_80", tmp_path)
    compiler.version = (12, 9)
    compile_cubin("passes", small(), "sm_90a", tmp_path)
    folder = tmp_path / "changed"
    shutil.copytree(FOLDER, folder)
    (folder / "tape.cuh").write_bytes((folder / "tape.cuh").read_bytes() + b"\n")
    monkeypatch.setattr(compiling, "INCLUDES", (folder, FOLDER.parent))
    compile_cubin("passes", small(), "sm_90a", tmp_path)
    assert compiler.runs == 6
    assert len(list(tmp_path.glob("*.cubin"))) == 6
    assert len(list(tmp_path.glob("*-nvrtc12.9-*.cubin"))) == 2
    assert {path.suffix for path in tmp_path.iterdir() if path.is_file()} == {".cubin"}


def test_the_folder_is_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compile_cubin("passes", small(), "sm_90a")
    compile_cubin("passes", small(), "sm_90a")
    assert compiler.runs == 1
    assert len(list((tmp_path / "laneformer" / "cubins").iterdir())) == 1


def test_a_fault_in_the_source_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiler's own words and the place; nothing is kept."""
    broken = tmp_path / "kernels"
    shutil.copytree(FOLDER, broken)
    (broken / "sampling.cuh").write_text("int oops = nowhere;\n" + (broken / "sampling.cuh").read_text())
    monkeypatch.setattr(compiling, "INCLUDES", (broken, FOLDER.parent))
    kept = tmp_path / "kept"
    with pytest.raises(
        RuntimeError, match=re.compile(r"sampling.cuh\(1\).*\"nowhere\" is undefined", re.DOTALL)
    ) as error:
        compile_cubin("passes", small(), "sm_90a", kept)
    assert "passes kernels do not compile for sm_90a" in str(error.value)
    assert not kept.exists()


def test_an_unknown_gpu_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no compiler .NVRTC. here fits sm_1234; installed: "):
        compile_cubin("passes", small(), "sm_1234", tmp_path)


def test_a_folder_that_cannot_be_written_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, folder, file = Compiler(monkeypatch), tmp_path / "cubins", tmp_path / "file"
    file.write_text("not a folder")
    made = compile_cubin("passes", small(), "sm_90a", file)
    assert compile_cubin("passes", small(), "sm_90a", file) == made
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(PermissionError("read-only")))
    assert compile_cubin("passes", small(), "sm_90a", folder) == made
    assert compiler.runs == 3
    assert file.is_file()
    assert not list(folder.iterdir())


def test_an_unknown_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'persistant' is unknown; choose from"):
        compile_cubin("persistant", small(), "sm_90a", tmp_path)
