"""Run the CUDA engine's kernels on the CPU, as a translation unit built over emulator.h.

Every thread of a launch runs as a fiber, in an order drawn from a seed. Checked are what a GPU
leaves undefined (machine.h) and, for any order, words overwritten before they were read (order.h).
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
MISSING = "" if shutil.which("g++") else "the CUDA emulator needs g++"
if platform.machine() not in ("x86_64", "AMD64"):
    MISSING = "the CUDA emulator needs an x86-64 CPU"
WATCHDOG = 1


class EmulationError(AssertionError):
    """A launch did what a GPU leaves undefined, or did not end."""


@dataclass(frozen=True)
class Report:
    """Counts of one launch: stores of words, accepted reads, unread words overwritten, and steps."""

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
    """Return the library of one translation unit, built unless `cache_dir` has it already.

    Args:
        source: includes emulator.h and ends with EMULATE(kernel, Params) for each kernel.
        races: also check accesses of plain data (races.h), at about five times the processor time.

    Raises:
        RuntimeError: The unit does not compile; with the compiler's message.
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
    sources = [path for folder in folders for path in sorted(folder.iterdir())]
    # what the folders hold, not where they are: a copy of the sources is the same build
    parts = [
        repr((options, compiler())).encode(),
        source.encode(),
        *(path.read_bytes() for path in sources if path.suffix in (".h", ".cuh", ".cu")),
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
            # a rename is atomic, so another process never loads half a library
            shared.rename(library)
    return ctypes.CDLL(str(library))


def key_of(parts: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[
        :16
    ]


def compile_step(what: str, command: Sequence[str | Path]):
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{what} does not compile:\n{result.stderr}")


@functools.cache
def precompile_headers() -> Path:
    """Return the precompiled header of what no unit changes, built once per compiler and contents."""
    # a unit that includes it compiles in a quarter less time
    parts = [
        repr((FLAGS, compiler())).encode(),
        *((FOLDER / name).read_bytes() for name in MACHINE),
    ]
    folder = CACHE / "emulated" / f"machine-{key_of(parts)}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            unit_folder = Path(temporary) / "made"
            unit_folder.mkdir()
            (unit_folder / "machine_first.h").write_text(
                "".join(f'#include "{name}"\n' for name in ("math.h", *MACHINE))
            )
            command = [
                "g++",
                *FLAGS,
                f"-I{FOLDER}",
                "-x",
                "c++-header",
                str(unit_folder / "machine_first.h"),
            ]
            compile_step("the emulator's machine", command)
            with contextlib.suppress(OSError):  # another process was first
                unit_folder.rename(folder)
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
    """Run one grid to the end, or one grid for each of `params` side by side.

    Args:
        params: laid out as the kernel's Params.
        threads: per block, a multiple of 32.
        seed: of the order in which threads run and of the delay of copies.
        watchdog: leave a launch that is stuck to the kernel's own time-out.
        names: {name: (address, bytes)} of word buffers, for messages.
        plain: the same of buffers, besides shared memory, whose accesses are checked in a library
            built with `races`.

    Raises:
        EmulationError: with the place and the seed.
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
    status = getattr(library, f"emulate_{kernel}")(
        (kind * len(grids))(*map(kind.from_buffer_copy, grids)),
        len(grids),
        blocks,
        threads,
        shared_bytes,
        ctypes.c_uint64(seed),
        # when nothing can go on, the clock advances, faster and faster, until the kernel gives up
        WATCHDOG if watchdog else 0,
        message,
        len(message),
    )
    if status:
        raise EmulationError(f"{kernel}, seed {seed}: {message.value.decode()}")
    figures = (ctypes.c_uint64 * 4)()
    library.emulator_report(figures)
    return Report(*figures)


def plain_accesses(library) -> tuple[int, int]:
    """Return the checked reads and writes of plain data in the last launch, in units of 4 bytes."""
    figures = (ctypes.c_uint64 * 2)()
    library.emulator_plain_report(figures)
    return figures[0], figures[1]
