"""The shipped kernels as they are shipped: PTX of NVRTC for an architecture, executed on the emulated machine.

`build` has NVRTC compile a translation unit, translates its PTX (emit.py), and has g++ compile that over ptx.h. What is
built takes launches as an emulated build does (emulator.py).
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laneformer.engine.cuda.compile import FOLDER, INCLUDES, keep
from laneformer.engine.cuda.nvrtc import OPTIONS, Nvrtc, compiler_for, compilers
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.emulated import EmulatedPasses
from tests.laneformer.cuda.harness import KERNELS
from tests.laneformer.cuda.ptx.emit import emit
from tests.laneformer.cuda.ptx.parse import parse
from tests.proofs import CACHE

HERE = Path(__file__).resolve().parent
MISSING = emulator.MISSING or ("" if compilers() else "needs the cuda extra: pip install 'laneformer[cuda]'")
ARCHITECTURES = ("sm_80", "sm_90a")  # copies by cp.async; by the copy engine


def ptx_of(source: str, architecture: str, includes: Sequence[Path] = INCLUDES) -> str:
    """What NVRTC makes of a translation unit on its way to machine code; kept in CACHE by all that decides it."""
    compiler = compiler_for(architecture, None)
    included = [p for f in includes for p in sorted(f.iterdir()) if p.suffix in (".h", ".cuh", ".cu")]
    decides = [
        repr((source, architecture, OPTIONS, compiler.version)).encode(),
        *map(Path.read_bytes, included),
    ]
    whole = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in decides))
    kept = CACHE / "ptx" / f"{architecture}-{whole.hexdigest()[:16]}.ptx"
    if not kept.is_file():
        keep(kept, PtxOf(compiler.path).compile(source, architecture, includes).rstrip(b"\0"))
    return kept.read_text()


class PtxOf(Nvrtc):
    """NVRTC as the engine calls it, asked for the text that its machine code was assembled from."""

    def _get(self, what: str, program: ctypes.c_void_p) -> bytes:
        return super()._get("PTX" if what == "CUBIN" else what, program)


def build(ptx: str, builds: Path) -> ctypes.CDLL:
    """The library that executes a module; UnknownPtx for an instruction that is in no table."""
    return emulator.build(emit(parse(ptx)), [HERE], {}, builds)


def check_argument(library: ctypes.CDLL, kernel: str, argument: ctypes.Structure) -> None:
    """The host's structure has the size that the kernel was compiled for."""
    compiled = library[f"bytes_of_{kernel}"]()
    if compiled != ctypes.sizeof(argument):
        raise emulator.EmulationError(
            f"{kernel} takes {compiled} bytes, the host's {type(argument).__name__} has {ctypes.sizeof(argument)}"
        )


class ExecutedPasses(EmulatedPasses):
    """EmulatedPasses whose kernels are the PTX for `architecture`."""

    declaration = "__device__ int planted;\n"

    def __init__(self, builds: Path, columns: int, architecture: str, **options: Any):
        self.architecture = architecture  # of what __init__ copies, too
        super().__init__(builds, columns, **options)

    def build(self, source: str, builds: Path, folder: Path = FOLDER) -> ctypes.CDLL:
        return build(ptx_of(source, self.architecture, [folder, *INCLUDES]), builds)

    def _emulate(self, arguments: Sequence[Any], build: int, library: ctypes.CDLL) -> None:
        for kernel in KERNELS[self.version]:
            check_argument(library, kernel, arguments[0])
        super()._emulate(arguments, build, library)
