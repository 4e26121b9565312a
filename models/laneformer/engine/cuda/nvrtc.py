"""Find NVIDIA's run-time compilers, and the newest one whose code the driver loads."""

from __future__ import annotations

import contextlib
import ctypes as c
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

# in packages, environments and toolkits
PLACES = ("nvidia/*/lib", "torch/lib", "lib", "lib64", "targets/*/lib")
OPTIONS = ("--std=c++17", "--fmad=false")  # of all units
BY_NAME = ("libnvrtc.so.13", "libnvrtc.so.12")  # where the loader looks


class Nvrtc:
    """One libnvrtc.

    Attributes:
        version: Such as (13, 0).
        architectures: Numbers of those that it compiles for.
    """

    def __init__(self, library: str):
        # NVRTC 13.0 does not look beside itself for the part that it opens by name
        if Path(library).is_absolute():
            for part in Path(library).parent.glob("libnvrtc-builtins.so.*"):
                with contextlib.suppress(OSError):  # without it a compilation fails, and says why
                    c.CDLL(str(part))
        self.path, self._library = library, c.CDLL(library)
        major, minor, count = c.c_int(), c.c_int(), c.c_int()
        self._library.nvrtcVersion(c.byref(major), c.byref(minor))
        self._library.nvrtcGetNumSupportedArchs(c.byref(count))
        numbers = (c.c_int * count.value)()
        self._library.nvrtcGetSupportedArchs(numbers)
        self.version, self.architectures = (major.value, minor.value), frozenset(numbers)

    def compile(
        self, source: str, architecture: str, includes: Sequence[Path] = (), *options: str
    ) -> bytes:
        """Return machine code (a cubin); raise RuntimeError with the compiler's log."""
        arguments = [
            f"--gpu-architecture={architecture}",
            *OPTIONS,
            *options,
            *(f"-I{path}" for path in includes),
        ]
        program = c.c_void_p()
        self._library.nvrtcCreateProgram(
            c.byref(program), source.encode(), b"kernels.cu", 0, None, None
        )
        try:
            array = (c.c_char_p * len(arguments))(*(text.encode() for text in arguments))
            if self._library.nvrtcCompileProgram(program, len(arguments), array):
                raise RuntimeError(self._get("ProgramLog", program).rstrip(b"\0").decode())
            return self._get("CUBIN", program)
        finally:
            self._library.nvrtcDestroyProgram(c.byref(program))

    def _get(self, name: str, program: c.c_void_p) -> bytes:
        size = c.c_size_t()
        getattr(self._library, f"nvrtcGet{name}Size")(program, c.byref(size))
        content = c.create_string_buffer(size.value)
        getattr(self._library, f"nvrtcGet{name}")(program, content)
        return content.raw


@functools.cache
def compilers() -> tuple[Nvrtc, ...]:
    compilers: dict[tuple[int, int], Nvrtc] = {}
    for path in libraries():
        # a file that is not for this machine, a dangling link
        with contextlib.suppress(OSError, AttributeError):
            compiler = Nvrtc(path)
            compilers.setdefault(compiler.version, compiler)
    return tuple(compilers[version] for version in sorted(compilers, reverse=True))


def libraries() -> Iterator[str]:
    toolkits = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX")]
    roots = [*sys.path, sys.prefix, *toolkits, *map(str, Path("/usr/local").glob("cuda*"))]
    for root in dict.fromkeys(filter(None, roots)):
        for place in PLACES:
            # libnvrtc-builtins is a part
            yield from map(str, sorted(Path(root).glob(f"{place}/libnvrtc[.-][!b]*")))
    yield from BY_NAME


def compiler_for(architecture: str, driver: int | None) -> Nvrtc:
    """Return the newest compiler for an architecture such as "sm_90a" whose code the driver loads.

    Args:
        driver: Version such as 12040; None for any.

    Raises:
        RuntimeError: No such compiler; the message names what is installed and what to install.
    """
    number = int("".join(filter(str.isdigit, architecture)))
    for compiler in compilers():
        # NVRTC 13 writes machine code (ELF ABI 8) that drivers for CUDA 12 do not load
        if (
            driver is None or compiler.version[0] <= driver // 1000
        ) and number in compiler.architectures:
            return compiler
    installed = ", ".join(
        f"{major}.{minor}" for major, minor in (compiler.version for compiler in compilers())
    )
    limit = (
        ""
        if driver is None
        else f" and the driver, which loads code of CUDA {driver // 1000} at most"
    )
    package = (
        "nvidia-cuda-nvrtc-cu12" if driver is not None and driver < 13000 else "nvidia-cuda-nvrtc"
    )
    raise RuntimeError(
        f"no compiler (NVRTC) here fits {architecture}{limit}; installed: {installed or 'none'}: "
        f"pip install --upgrade {package}"
    )
