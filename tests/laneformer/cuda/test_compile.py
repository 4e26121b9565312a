"""Tests that cubins are cached by all that determines them, and of compile errors."""

from __future__ import annotations

import os
import re
import shutil

import pytest

from laneformer.engine.cuda import compile as compiling
from laneformer.engine.cuda.compile import FOLDER, compile_cubin
from laneformer.engine.cuda.geometry import H200, Geometry
from laneformer.engine.cuda.nvrtc import compilers
from laneformer.engine.cuda.planning import plan
from tests.laneformer.cuda.harness import small_config


def small(**shape) -> Geometry:
    config = small_config(num_hidden_layers=2, swa_layers=(0,))
    return plan(config, "bf16", H200, **{"warps": 2, "blocks_per_lane": 4, **shape})


class Compiler:
    """A replacement for NVRTC that counts calls and returns a cubin of the source."""

    def __init__(self, monkeypatch):
        self.runs, self.version = 0, (13, 0)
        monkeypatch.setattr(compiling, "compiler_for", lambda architecture, driver: self)

    def compile(self, source, architecture, includes) -> bytes:
        self.runs += 1
        return source.encode() + architecture.encode()


def test_a_cubin_is_compiled_once(tmp_path, monkeypatch):
    # again for a change of anything that determines it; nothing else stays in the user's cache
    compiler = Compiler(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = compile_cubin("passes", small(), "sm_90a")
    assert compile_cubin("passes", small(), "sm_90a") == first
    assert compiler.runs == 1
    compile_cubin("passes", small(blocks_per_lane=3), "sm_90a")
    compile_cubin("graph", small(), "sm_90a")
    compile_cubin("passes", small(), "sm_80")
    compiler.version = (12, 9)
    compile_cubin("passes", small(), "sm_90a")
    changed = tmp_path / "changed"
    shutil.copytree(FOLDER, changed)
    (changed / "tape.cuh").write_bytes((changed / "tape.cuh").read_bytes() + b"\n")
    monkeypatch.setattr(compiling, "INCLUDES", (changed, FOLDER.parent))
    compile_cubin("passes", small(), "sm_90a")
    assert compiler.runs == 6
    cubin_names = [path.name for path in (tmp_path / "laneformer" / "cubins").iterdir()]
    assert [name.endswith(".cubin") for name in cubin_names] == [True] * 6
    assert sum("-nvrtc12.9-" in name for name in cubin_names) == 2


@pytest.mark.skipif(not compilers(), reason="needs the cuda extra: pip install 'laneformer[cuda]'")
def test_what_does_not_compile_is_reported(tmp_path, monkeypatch):
    # with the compiler's message and the place; nothing is cached
    with pytest.raises(RuntimeError, match=r"no compiler .NVRTC. here fits sm_1234; installed: "):
        compile_cubin("passes", small(), "sm_1234", tmp_path)
    broken, cache = tmp_path / "kernels", tmp_path / "kept"
    shutil.copytree(FOLDER, broken)
    (broken / "sampling.cuh").write_text(
        "int oops = nowhere;\n" + (broken / "sampling.cuh").read_text()
    )
    monkeypatch.setattr(compiling, "INCLUDES", (broken, FOLDER.parent))
    message = (
        r"passes kernels do not compile for sm_90a.*sampling.cuh\(1\).*\"nowhere\" is undefined"
    )
    with pytest.raises(RuntimeError, match=re.compile(message, re.DOTALL)):
        compile_cubin("passes", small(), "sm_90a", cache)
    assert not cache.exists()


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path, monkeypatch):
    # a cache that is a file, then one in which the last rename fails: each time the cubin is
    # compiled again, and nothing is left half-written
    compiler, folder, file = Compiler(monkeypatch), tmp_path / "cubins", tmp_path / "file"
    file.write_text("not a folder")
    cubin = compile_cubin("passes", small(), "sm_90a", file)
    assert compile_cubin("passes", small(), "sm_90a", file) == cubin
    monkeypatch.setattr(
        os, "replace", lambda *_: (_ for _ in ()).throw(PermissionError("read-only"))
    )
    assert compile_cubin("passes", small(), "sm_90a", folder) == cubin
    assert compiler.runs == 3
    assert file.is_file()
    assert not list(folder.iterdir())
