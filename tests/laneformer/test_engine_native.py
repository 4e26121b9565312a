"""The engine's core as a C++ program: under sanitizers, which must also catch planted faults, and on aarch64 with NEON.

Each build compiles only what it needs; both sanitizers together take about two minutes on two cores.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
AARCH64 = {
    "CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": "aarch64", "CMAKE_CXX_COMPILER": "aarch64-linux-gnu-g++",
}  # fmt: skip
ON_X86 = platform.machine() in ("x86_64", "AMD64")
pytestmark = pytest.mark.slow


def build(folder: Path, check: str, **definitions: str) -> Path:
    """The check program with these sanitizers (or "none")."""
    tools = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    cmake = shutil.which("cmake", path=tools)
    if cmake is None:
        pytest.skip("no cmake")
    flags = [f"-D{name}={value}" for name, value in {"LANEFORMER_CHECK": check, **definitions}.items()]
    for command in (["-S", ROOT, "-B", folder, *flags], ["--build", folder, "--parallel", "2"]):
        done = subprocess.run([cmake, *command], capture_output=True, text=True, env={**os.environ, "PATH": tools})
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "_core"


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


def hashes(*command: str | Path) -> dict[str, str]:
    """Instruction set -> hash of its logits; the program must find nothing wrong."""
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    ok, *pairs = done.stdout.splitlines()[-1].split()
    assert ok == "ok"
    return dict(pair.split("=") for pair in pairs)


@pytest.mark.parametrize(
    ("sanitizer", "fault", "report"),
    [("address,undefined", "overflow", "heap-buffer-overflow"), ("thread", "race", "data race")],
)
def test_sanitizers_find_nothing_but_a_planted_fault(tmp_path, sanitizer, fault, report):
    program = build(tmp_path, sanitizer)
    assert "portable" in hashes(program)
    caught = run(program, fault)
    assert caught.returncode != 0
    assert report in caught.stderr, caught.stdout + caught.stderr


@pytest.mark.skipif(not ON_X86, reason="compares with x86")
def test_neon_gives_the_bits_of_avx2(tmp_path):
    """NEON fuses multiply-adds as AVX2 does and every sum has the same order, so nothing may differ."""
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if emulator is None or shutil.which(AARCH64["CMAKE_CXX_COMPILER"]) is None:
        pytest.skip("no aarch64 compiler or emulator")
    here = hashes(build(tmp_path / "x86", "none"))
    there = hashes(emulator, build(tmp_path / "aarch64", "none", **AARCH64))
    if "avx2" not in here:
        pytest.skip("this CPU has no AVX2 to compare with")
    assert there == {"portable": here["avx2"]}
    assert here["avx2"] != here["portable"], "fused and unfused sums cannot agree: the comparison sees nothing"
