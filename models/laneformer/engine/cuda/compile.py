"""Compile CUDA kernels from source at run time, without a toolkit and without a GPU.

nvrtc.py calls the compiler, launch.py starts the kernels. Cubins are kept in the user's cache directory
under a hash of sources, constants, options and the compiler's version.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from pathlib import Path

from ..home import user_cache
from .constants import constants_of
from .geometry import Geometry
from .nvrtc import OPTIONS, Nvrtc, compiler_for

FOLDER = Path(__file__).parent
INCLUDES = (FOLDER, FOLDER.parent)  # there is sampling.h, which the C++ core shares


def source_of(version: str, geometry: Geometry) -> str:
    """Return the geometry's constants followed by the kernels of a version, or of the probe."""
    return (
        f'#define GRAPH {version == "graph":d}\n{constants_of(geometry)}#include "{version}.cu"\n'
    )


def compile_cubin(
    version: str,
    geometry: Geometry,
    architecture: str,
    cache: Path | None = None,
    driver: int | None = None,
    compiler: Nvrtc | None = None,
) -> bytes:
    """Return machine code for an architecture such as "sm_90a".

    Args:
        cache: Folder of cubins; by default $XDG_CACHE_HOME/laneformer/cubins.
        compiler: By default the newest one whose code this driver loads.

    Raises:
        RuntimeError: With the compiler's message.
    """
    source, compiler = source_of(version, geometry), compiler or compiler_for(architecture, driver)
    patterns = [(folder, suffix) for folder in INCLUDES for suffix in ("*.cu*", "*.h")]
    sources = itertools.chain.from_iterable(
        sorted(folder.glob(suffix)) for folder, suffix in patterns
    )
    included = b"".join(path.read_bytes() for path in sources)
    cache_key = repr((source, architecture, OPTIONS, compiler.version)).encode() + included
    folder = cache or user_cache() / "cubins"
    name = f"{version}-{architecture}-nvrtc{compiler.version[0]}.{compiler.version[1]}"
    cached = folder / f"{name}-{hashlib.sha256(cache_key).hexdigest()[:20]}.cubin"
    if cached.is_file():
        return cached.read_bytes()
    try:
        cubin = compiler.compile(source, architecture, INCLUDES)
    except RuntimeError as error:
        raise RuntimeError(
            f"the {version} kernels do not compile for {architecture}: {error}"
        ) from None
    store_cubin(cached, cubin)
    return cubin


def store_cubin(path: Path, cubin: bytes) -> None:
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(cubin)
        # whole or not at all
        os.replace(unfinished, path)
    except OSError:
        # without the file, the next start compiles again
        with contextlib.suppress(OSError):
            unfinished.unlink()
