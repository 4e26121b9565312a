"""Kernels of the CUDA engine on the CPU: build a translation unit over emulator.h, launch what it emulates.

A launch runs every thread of its grids as a fiber, in an order drawn from a seed, and checks what a GPU would
leave undefined (machine.h) and that no word is overwritten before it was read, in any order (order.h).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.proofs import CACHE

FOLDER = Path(__file__).resolve().parent
FLAGS = ("-O1", "-std=c++20", "-fPIC", "-w", "-DEMULATED")
# headers that no unit changes
MACHINE = ("clocks.h", "launch.h", "machine.h", "order.h", "races.h", "scheduler.h", "warp.h")
# races.h takes the place of the sanitizer's library
SEES_PLAIN = ("-fsanitize=thread", "-DSEES_PLAIN")
MISSING = (
    "the CUDA emulator needs g++"
    if shutil.which("g++") is None
    else "the CUDA emulator needs an x86-64 CPU"
    if platform.machine() not in ("x86_64", "AMD64")
    else ""
)
WATCHDOG = 1


class EmulationError(AssertionError):
    """A launch did what a GPU leaves undefined, or did not end."""


@dataclass(frozen=True)
class Report:
    """What a launch did: stores of words, accepted reads, words overwritten that nobody had read, steps."""

    stores: int
    accepted: int
    overwritten_unread: int
    steps: int


def build(
    source,
    include_dirs: Sequence[Path],
    defines: Mapping[str, object],
    cache_dir: Path,
    races: bool = False,
) -> ctypes.CDLL:
    """The library of one translation unit, from `cache_dir` if the same was built before.

    The unit includes emulator.h and ends with EMULATE(kernel, Params) for each kernel. races: it also
    checks accesses of plain data (races.h), for some five times the processor time. RuntimeError:
    with the compiler's message.
    """
    if MISSING:
        raise RuntimeError(MISSING)
    folders = [FOLDER, *include_dirs]
    options = [
        *FLAGS,
        *(SEES_PLAIN if races else ()),
        *(f"-D{name}={value}" for name, value in defines.items()),
    ]
    command = ["g++", *options, *(f"-I{f}" for f in folders)]
    if not races:
        command += ["-include", str(precompile_headers())]
    included = [
        p
        for folder in folders
        for p in sorted(folder.iterdir())
        if p.suffix in (".h", ".cuh", ".cu")
    ]
    # what the folders hold, not where they are: a copy of the sources is the same build
    parts = [
        repr((options, compiler())).encode(),
        source.encode(),
        *(p.read_bytes() for p in included),
    ]
    library = cache_dir / f"emulated-{key_of(parts)}.so"
    if not library.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir) as folder:
            unit, assembled, shared = (
                Path(folder) / f"unit.{ending}" for ending in ("cpp", "o", "so")
            )
            unit.write_text(source)
            for step in (
                [*command, "-c", unit, "-o", assembled],
                ["g++", "-shared", assembled, "-o", shared],
            ):
                compile_step("the emulated unit", step)
            shared.rename(library)
    return ctypes.CDLL(str(library))


def key_of(parts: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[
        :16
    ]


def compile_step(what: str, command: Sequence[str | Path]):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{what} does not compile:\n{done.stderr}")


@functools.cache
def precompile_headers() -> Path:
    """A header with what does not depend on the unit, which its compiler does not read again: a quarter of its time.

    It is made once in CACHE, for this compiler and these contents.
    """
    parts = [
        repr((FLAGS, compiler())).encode(),
        *((FOLDER / name).read_bytes() for name in MACHINE),
    ]
    folder = CACHE / "emulated" / f"machine-{key_of(parts)}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            made = Path(temporary) / "made"
            made.mkdir()
            (made / "machine_first.h").write_text(
                "".join(f'#include "{name}"\n' for name in ("math.h", *MACHINE))
            )
            command = [
                "g++",
                *FLAGS,
                f"-I{FOLDER}",
                "-x",
                "c++-header",
                str(made / "machine_first.h"),
            ]
            compile_step("the emulator's machine", command)
            with contextlib.suppress(OSError):  # another process was first
                made.rename(folder)
    return folder / "machine_first.h"


@functools.cache
def compiler() -> str:
    return subprocess.run(
        ["g++", "-dumpfullversion", "-dumpmachine"], capture_output=True, text=True
    ).stdout


def launch(
    library,
    kernel: str,
    params: ctypes.Structure | Sequence[ctypes.Structure],
    *,
    blocks: int,
    threads,
    shared_bytes: int = 0,
    seed=0,
    watchdog: bool = False,
    names: Mapping[str, tuple[int, int]] | None = None,
    plain: Mapping[str, tuple[int, int]] | None = None,
) -> Report:
    """Run one grid, or one for each of `params` side by side, to the end.

    params: laid out as the kernel's Params. threads: of a block, a multiple of 32. seed: of the order in
    which threads run and of the delay of copies. names: {name: (address, bytes)} of word buffers, for
    messages; plain: the same of buffers beside shared memory whose accesses are checked, where the library
    was built for that. watchdog: a launch in which nothing can go on is left to the kernel's own time-out:
    the clock runs on, faster and faster. EmulationError: what went wrong, with the place and the seed.
    """
    grids = [params] if isinstance(params, ctypes.Structure) else list(params)
    if threads % 32 or threads < 32:
        raise ValueError(f"threads: {threads}; give a multiple of 32")
    for name, (address, size) in (names or {}).items():
        library.emulator_name(name.encode(), ctypes.c_void_p(address), ctypes.c_uint64(size))
    for name, (address, size) in (plain or {}).items():
        library.emulator_plain(name.encode(), ctypes.c_void_p(address), ctypes.c_uint64(size))
    message = ctypes.create_string_buffer(16384)
    kind = type(grids[0])  # the others' may be an equal class
    failed = getattr(library, f"emulate_{kernel}")(
        (kind * len(grids))(*map(kind.from_buffer_copy, grids)),
        len(grids),
        blocks,
        threads,
        shared_bytes,
        ctypes.c_uint64(seed),
        WATCHDOG if watchdog else 0,
        message,
        len(message),
    )
    if failed:
        raise EmulationError(f"{kernel}, seed {seed}: {message.value.decode()}")
    figures = (ctypes.c_uint64 * 4)()
    library.emulator_report(figures)
    return Report(*figures)


def plain_accesses(library) -> tuple[int, int]:
    """Checked reads and writes of plain data in the last launch, counted in 4 bytes."""
    figures = (ctypes.c_uint64 * 2)()
    library.emulator_plain_report(figures)
    return figures[0], figures[1]
