"""Tests that the newest compiler on the machine whose code the driver loads is chosen."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from laneformer.engine.cuda import nvrtc
from laneformer.engine.cuda.nvrtc import compiler_for, compilers

SOURCE = Path(__file__).with_name("fake_nvrtc.c")
INSTALLED = {  # where pip, a toolkit and PyTorch have them
    "nvidia/cu13/lib/libnvrtc.so.13": (13, 0, "80, 90, 100, 120"),
    "nvidia/cuda_nvrtc/lib/libnvrtc.so.12": (12, 6, "80, 90"),
    "toolkit/lib64/libnvrtc.so.12.9.86": (12, 9, "80, 90, 100, 120"),
    "torch/lib/libnvrtc-0a1b2c3d.so.11.2": (11, 2, "80"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    compiler = shutil.which("gcc") or pytest.skip("needs gcc")
    folder = tmp_path_factory.mktemp("compilers")
    for path, (major, minor, architectures) in INSTALLED.items():
        (folder / path).parent.mkdir(parents=True)
        defines = [f"-DMAJOR={major}", f"-DMINOR={minor}", f"-DARCHITECTURES={architectures}"]
        subprocess.run(
            [compiler, "-shared", "-fPIC", *defines, str(SOURCE), "-o", str(folder / path)],
            check=True,
        )
    # what looks like a compiler and is none: builtins, a dangling link, another machine's library
    (folder / "nvidia/cu13/lib/libnvrtc-builtins.so.13.0").write_text("no compiler")
    (folder / "nvidia/cu13/lib/libnvrtc.so.14").symlink_to("nowhere")
    (folder / "torch/lib/libnvrtc.so.12").write_text("for another machine")
    return folder


@pytest.fixture
def installed_compilers(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(folder)])
    monkeypatch.setattr(sys, "prefix", "/nowhere")
    monkeypatch.setattr(nvrtc, "BY_NAME", ())
    monkeypatch.setenv("CUDA_HOME", str(folder / "toolkit"))
    compilers.cache_clear()
    yield
    compilers.cache_clear()


def test_the_newest_that_the_driver_takes(installed_compilers):
    versions = [compiler.version for compiler in compilers()]
    assert versions == sorted(versions, reverse=True)
    assert {*versions} >= {(13, 0), (12, 9), (12, 6), (11, 2)}
    chosen = {
        ("sm_90a", None): (13, 0), ("sm_120a", 13000): (13, 0), ("sm_90a", 12080): (12, 9), ("sm_80", 12020): (12, 9),
        ("sm_120a", 12080): (12, 9), ("sm_80", 11080): (11, 2),
    }  # fmt: skip
    for (architecture, driver), version in chosen.items():
        assert compiler_for(architecture, driver).version == version


def test_what_to_install_is_said(installed_compilers, monkeypatch):
    with pytest.raises(
        RuntimeError, match=r"sm_77; installed: 13.0, 12.9.*: .* nvidia-cuda-nvrtc$"
    ):
        compiler_for("sm_77", None)
    monkeypatch.setattr(nvrtc, "compilers", lambda: ())
    with pytest.raises(
        RuntimeError, match=r"code of CUDA 12 at most; installed: none: .* nvidia-cuda-nvrtc-cu12$"
    ):
        compiler_for("sm_90a", 12040)
