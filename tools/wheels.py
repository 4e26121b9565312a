"""Wheels that other machines can install: manylinux for x86_64 and aarch64, macOS as far as it compiles.

    python -m tools.wheels --out dist --targets x86_64 aarch64 [--headers DIR]

All of them come from this machine. aarch64: Debian's cross-compiler. macOS: Zig's, which brings Apple's headers; nobody
has run it. What a Linux wheel needs of the C library is what auditwheel finds in it: it becomes the wheel's tag, or
the wheel is refused. A wheel is for this Python's version; from 3.12 on, or with the headers of such a Python, it is
for the stable ABI, and one serves all later versions. docs/release.md: what to do with them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

ROOT = Path(__file__).resolve().parents[1]
CROSS = "aarch64-linux-gnu-g++"
MACOS = "11.0"  # the first for these processors
STABLE = "cp312", "abi3"
Target = Literal["x86_64", "aarch64", "macos"]
HOSTS = {"x86_64": "linux-x86_64", "aarch64": "linux-aarch64", "macos": f"macosx-{MACOS}-arm64"}
SUFFIXES = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu", "macos": "darwin"}


@dataclass
class Wheels:
    """Build wheels, check what they need of a system, and name them after it."""

    out: Path = Path("dist")
    """Folder for the wheels."""
    targets: tuple[Target, ...] = ("x86_64", "aarch64")
    """macos needs the package ziglang."""
    headers: Path | None = None
    """Folder with Python.h of 3.12 or newer, for the stable ABI where an older Python builds."""

    def run(self) -> None:
        for target in self.targets:
            print(built(target, self.out, self.headers), flush=True)


def built(target: Target, out: Path, headers: Path | None = None) -> Path:
    """The wheel for a kind of machine; RuntimeError where it does not compile or would not run elsewhere."""
    native = headers is None and target == machine()
    with tempfile.TemporaryDirectory() as folder:
        options = ["--no-build-isolation", "--no-deps", "-w", folder]
        if (
            not native
        ):  # the native one lies in the build folder of the set-up: only what has changed is compiled
            abi = "abi3" if headers else f"cp{sys.version_info.major}{sys.version_info.minor}"
            options += ["-C", f"build-dir={ROOT / 'build' / f'wheel-{target}-{abi}'}"]
        environment = {} if native else crossing(target, headers)
        call([sys.executable, "-m", "pip", "wheel", "-q", *options, str(ROOT)], environment)
        (wheel,) = Path(folder).glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        named = tagged(wheel, headers is not None)
        return Path(shutil.move(named, out / named.name))


def machine() -> str:
    return sysconfig.get_platform().removeprefix("linux-")


def crossing(target: Target, headers: Path | None) -> dict[str, str]:
    """Variables by which scikit-build-core builds for another machine or Python; its own are those of this one."""
    suffix = f".cpython-{sys.version_info.major}{sys.version_info.minor}-{SUFFIXES[target]}.so"
    flags = [f"-DLANEFORMER_PYTHON_HEADERS={headers.resolve()}"] if headers else []
    if target == "macos":
        flags += zig(ROOT / "build" / "zig")
    elif target != machine():
        if shutil.which(CROSS) is None:
            raise ValueError(f"no {CROSS}: apt-get install g++-aarch64-linux-gnu")
        flags += [
            "-DCMAKE_SYSTEM_NAME=Linux",
            f"-DCMAKE_SYSTEM_PROCESSOR={target}",
            f"-DCMAKE_CXX_COMPILER={CROSS}",
        ]
    return {
        "_PYTHON_HOST_PLATFORM": HOSTS[target],
        "SETUPTOOLS_EXT_SUFFIX": suffix,
        "CMAKE_ARGS": " ".join(flags),
    }


def zig(folder: Path) -> list[str]:
    """Flags of CMake for Zig as a compiler for macOS; CMake wants its tools to be single programs."""
    try:
        import ziglang
    except ModuleNotFoundError:
        raise ValueError(
            "macOS needs the package ziglang, a compiler: pip install 'ziglang>=0.15,<0.17'"
        ) from None
    program = Path(ziglang.__file__).with_name("zig")
    folder.mkdir(parents=True, exist_ok=True)
    commands = {"c++": f"c++ -target aarch64-macos.{MACOS}", "ar": "ar", "ranlib": "ranlib"}
    for name, command in commands.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {program} {command} "$@"\n')
        (folder / name).chmod(0o755)
    return [
        "-DCMAKE_SYSTEM_NAME=Darwin", "-DCMAKE_SYSTEM_PROCESSOR=arm64", f"-DCMAKE_OSX_DEPLOYMENT_TARGET={MACOS}",
        f"-DCMAKE_CXX_COMPILER={folder / 'c++'}", f"-DCMAKE_AR={folder / 'ar'}",
        f"-DCMAKE_RANLIB={folder / 'ranlib'}", "-DCMAKE_INSTALL_NAME_TOOL=true",
    ]  # fmt: skip


def tagged(wheel: Path, stable: bool) -> Path:
    """The wheel under the tags that it deserves: of the stable ABI, and of the oldest C library that will do."""
    tags = ["--python-tag", STABLE[0], "--abi-tag", STABLE[1]] if stable else []
    if "linux" in wheel.name:
        tags += ["--platform-tag", manylinux(wheel)]
    if tags:
        call([sys.executable, "-m", "wheel", "tags", "--remove", *tags, str(wheel)])
    (found,) = wheel.parent.glob("*.whl")
    return found


def manylinux(wheel: Path) -> str:
    """The tag that auditwheel finds; RuntimeError where it is none that the package index takes."""
    said = " ".join(call([sys.executable, "-m", "auditwheel", "show", str(wheel)]).split())
    found = re.search(r'following platform tag: "(manylinux_\w+)"', said)
    if not found:
        raise RuntimeError(f"{wheel.name} would not run on other machines: {said}")
    return found[1]


def call(command: list[str], environment: dict[str, str] | None = None) -> str:
    """What a command prints; RuntimeError with all of it where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(environment or {})})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    tyro.cli(Wheels, prog="python -m tools.wheels", description=__doc__).run()


if __name__ == "__main__":
    main()
