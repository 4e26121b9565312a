"""Tests of the engine's core as a C++ program: under sanitizers, with planted faults, and on aarch64."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.proofs import CACHE, CORE_SOURCES, match_patterns

ROOT = Path(__file__).resolve().parents[3]
AARCH64 = {
    "CMAKE_SYSTEM_NAME": "Linux",
    "CMAKE_SYSTEM_PROCESSOR": "aarch64",
    "CMAKE_CXX_COMPILER": "aarch64-linux-gnu-g++",
}
# Under emulation and ThreadSanitizer, which are slow, only cases that differ in what these look at:
# in their types of numbers, or in what threads share (AddressSanitizer has all, of every
# instruction set).
OF_TYPES = ("fp16", "fp32", "int4", "int8_rounded", "fp16_kv", "int8_kv")
OF_THREADS = ("portable", "fp32", "int4", "family", "experts", "gpt_oss_int4", "flush", "int8_kv")
PRODUCTS = 13  # int8, int4, and the eleven types of blocks in GGUF files
ON_X86 = platform.machine() in ("x86_64", "AMD64")
# the first build of every instruction set under a sanitizer takes long beside other tests
pytestmark = [pytest.mark.proof(*CORE_SOURCES, programs=True), pytest.mark.timeout(2400)]


@contextlib.contextmanager
def sources() -> Iterator[Path]:
    """Yield, under a lock, the copy of the core's sources that all checkouts compile."""
    # files that did not change stay, so only what differs from the last checkout's is compiled
    copy = CACHE / "core"
    copy.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "core.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        contents = {
            path.relative_to(ROOT): path.read_bytes() for path in match_patterns(CORE_SOURCES)
        }
        for path in [path for path in copy.rglob("*") if path.is_file()]:
            if path.relative_to(copy) not in contents:
                path.unlink()
        for name, text in contents.items():
            path = copy / name
            if not path.exists() or path.read_bytes() != text:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(text)
        yield copy


# Each build compiles only what it needs. As proofs, they run again only when their sources change.
def build(check, name="", **definitions) -> Path:
    """Build the check program with these sanitizers (or "none"), or the module with ""."""
    checkout = hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]
    folder = CACHE / f"check-{name or check}"
    if not check:  # a module is for one environment's Python
        folder = folder.with_name(f"{folder.name}-{checkout}")
    tools = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    cmake = shutil.which("cmake", path=tools)
    if cmake is None:
        pytest.skip("no cmake")
    flags = [
        f"-D{name}={value}" for name, value in {"LANEFORMER_CHECK": check, **definitions}.items()
    ]
    with sources() as copy:
        for command in (["-S", copy, "-B", folder, *flags], ["--build", folder, "--parallel", "2"]):
            process = subprocess.run(
                [cmake, *command], capture_output=True, text=True, env={**os.environ, "PATH": tools}
            )
            assert process.returncode == 0, process.stdout + process.stderr
        program = folder / f"_core-{checkout}"  # another checkout's build leaves it as it is
        if check:
            shutil.copy2(folder / "_core", program)
    return program


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=1200)


def hashes(*command: str | Path) -> dict[str, str]:
    """Return {case: hash of its logits}; fail if the program reports an error."""
    process = run(*command)
    assert process.returncode == 0, process.stdout + process.stderr
    ok, *pairs = process.stdout.splitlines()[-1].split()
    assert ok == "ok"
    return dict(pair.split("=") for pair in pairs)


@pytest.fixture(scope="module")
def sanitizer_run():
    """Run the program under AddressSanitizer and UBSan with every instruction set; return its hashes."""
    program = build("address,undefined")
    return program, hashes(program)


def test_a_write_beyond_the_weights_is_caught_and_nothing_else_is(sanitizer_run):
    program, by_case = sanitizer_run
    assert "portable" in by_case
    process = run(program, "overflow")
    assert process.returncode != 0
    assert "heap-buffer-overflow" in process.stderr, process.stdout + process.stderr


def test_a_race_is_caught_and_nothing_else_is():
    program = build("thread")
    assert len(hashes(program, "only", *OF_THREADS)) == len(OF_THREADS) + PRODUCTS
    process = run(program, "race")
    assert process.returncode != 0
    assert "data race" in process.stderr, process.stdout + process.stderr


@pytest.mark.skipif(not ON_X86, reason="compares with x86")
def test_neon_gives_the_bits_of_avx2(sanitizer_run):
    # NEON fuses multiply-adds as AVX2 does, and every sum has the same order
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if emulator is None or shutil.which(AARCH64["CMAKE_CXX_COMPILER"]) is None:
        pytest.skip("no aarch64 compiler or emulator")
    x86 = sanitizer_run[1]
    if "avx2" not in x86:
        pytest.skip("this CPU has no AVX2 to compare with")
    arm = hashes(emulator, build("none", "aarch64", **AARCH64), "only", "portable", *OF_TYPES)
    assert arm.pop("portable") == x86["avx2"]
    assert len(arm) == len(OF_TYPES) + PRODUCTS
    assert arm == {name: x86[name] for name in arm}
    assert x86["avx2"] != x86["portable"], (
        "fused and unfused sums cannot agree: the comparison sees nothing"
    )


def test_all_kinds_of_requests_on_emulated_tiles():
    program = build("address,undefined", "tiles", LANEFORMER_EMULATED_TILES="ON")
    assert {"amx", "amx_rounded"} < hashes(program, "only", "amx", "amx_rounded").keys()
