"""Wheels for other machines: aarch64's gives the tokens of this one under qemu, macOS' compiles, and no page promises
an index.

The builds are proofs: while no source of the core changes, they are not repeated.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.proofs import CORE_SOURCES
from tools.wheels import CROSS, built, call, manylinux

ROOT = Path(__file__).resolve().parents[2]
QEMU = shutil.which("qemu-aarch64-static")
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHON = (  # Debian's, for the other processor: what `import laneformer` loads of a system
    f"python{VERSION}-minimal", f"libpython{VERSION}-minimal", f"libpython{VERSION}-stdlib", "libc6", "libgcc-s1",
    "libstdc++6", "zlib1g", "libexpat1", "libffi8", "libssl3", "libbz2-1.0", "liblzma5", "libuuid1",
)  # fmt: skip
PROOF = (*CORE_SOURCES, "pyproject.toml")
DECODE = """
import dataclasses, json
import laneformer
sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 512}
config = dataclasses.replace(laneformer.LaneformerConfig.from_flavor("tiny"), **sizes)
found = {"file": laneformer.__file__}
for dtype in ("fp16", "int8"):
    with laneformer.Engine.random(config, dtype=dtype, threads=2) as engine:
        found[dtype] = engine.generate(list(range(25)), max_new_tokens=20, ignore_eos=True)
print(json.dumps(found))
"""


def foreign_python(folder: Path) -> Path:
    """The interpreter of aarch64, with what it loads, below `folder`; nothing of it is installed on this machine."""
    apt = ["apt-get", "-qy", "-o", f"Dir::State::Lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache",
           "-o", "Dir::State::status=/dev/null", "-o", "APT::Architecture=arm64", "-o", "APT::Architectures=arm64",
           "-o", "APT::Sandbox::User=root"]  # fmt: skip
    for place in ("lists/partial", "cache/archives/partial", "debs", "root"):
        (folder / place).mkdir(parents=True)
    for command in (["update"], ["download", *PYTHON]):
        done = subprocess.run([*apt, *command], cwd=folder / "debs", capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"Debian's packages of arm64 cannot be had: {done.stderr[-300:]}")
    for package in (folder / "debs").glob("*.deb"):
        call(["dpkg", "-x", str(package), str(folder / "root")])
    return folder / "root"


@pytest.mark.proof(*PROOF)
@pytest.mark.skipif(
    not (QEMU and shutil.which(CROSS) and shutil.which("apt-get")), reason="no cross-compiler or qemu"
)
def test_aarch64_gives_the_tokens_of_x86_64(tmp_path: Path) -> None:
    wheel = built("aarch64", tmp_path / "dist")
    assert wheel.name.endswith("_aarch64.whl")
    root, packages = foreign_python(tmp_path / "debian"), tmp_path / "packages"
    platforms = [f"manylinux_2_{minor}_aarch64" for minor in (34, 28, 27, 17)] + ["manylinux2014_aarch64"]
    call([
        sys.executable, "-m", "pip", "install", "-q", "--target", str(packages), "--only-binary", ":all:",
        *(word for name in platforms for word in ("--platform", name)), "--python-version", VERSION, str(wheel),
    ])  # fmt: skip
    python = [str(QEMU), "-L", str(root), "-E", f"PYTHONPATH={packages}", f"{root}/usr/bin/python{VERSION}"]
    there, here = (
        json.loads(call([*interpreter, "-c", DECODE], {"LANEFORMER_ISA": isa}))
        for interpreter, isa in ((python, ""), ([sys.executable], "avx2"))
    )
    assert str(packages) in there.pop("file")
    assert here.pop("file")
    assert there == here
    assert len({*here["fp16"], *here["int8"]}) > 5


@pytest.mark.proof(*PROOF)
@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="no ziglang, a compiler for macOS")
def test_macos_compiles(tmp_path: Path) -> None:
    wheel = built("macos", tmp_path)
    assert wheel.name.endswith("-macosx_11_0_arm64.whl")
    with zipfile.ZipFile(wheel) as files:
        (module,) = (name for name in files.namelist() if "_core." in name)
        assert files.read(module)[:8] == bytes.fromhex("cffaedfe0c000001"), "Mach-O, of 64 bits, for arm64"


def test_a_wheel_for_this_machine_alone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.wheels.call", lambda _: 'following platform tag:\n"linux_x86_64".')
    with pytest.raises(RuntimeError, match="would not run on other machines"):
        manylinux(tmp_path / "laneformer-0.1.0-cp311-cp311-linux_x86_64.whl")


def test_no_page_promises_an_index() -> None:
    """docs/release.md says what it takes; until then, `pip install laneformer` would install whatever somebody
    registers.
    """
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    promise = re.compile(r"(pipx?|uv)\b.*\b(install|run)\b[^.\n]*?[\s\"']laneformer\b(?!-)")
    found = [f"{page.name}: {line}" for page in pages if page.name != "release.md"
             for line in page.read_text().splitlines() if promise.search(line)]  # fmt: skip
    assert found == [], "say `pip install .` from a checkout"
