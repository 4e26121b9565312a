"""Kernels from source to machine code at run time, through cuda-core and without a toolkit; then loaded and launched.

The sources are compiled for one geometry and one architecture, which needs no GPU. Cubins are kept in the user's cache
directory under a hash of everything that decides them: sources, constants, options, and the compiler's version.
cuda-core loads the code; the launch goes to the driver's `cuLaunchKernelEx`, because the argument is a structure.
Streams are torch's, so that torch captures graphs, orders copies and frees memory as ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
from pathlib import Path
from typing import Any

import torch

from .geometry import Geometry, Machine

FOLDER = Path(__file__).parent
INCLUDES = (FOLDER, FOLDER.parent)  # there is sampling.h, which the C++ core shares
VERSIONS = ("persistent", "graph")
UNITS = (*VERSIONS, "probe")
MISSING = "the CUDA engine compiles its kernels with cuda-core: pip install 'laneformer[cuda]'"


def source_of(version: str, geometry: Geometry) -> str:
    """One translation unit: the geometry's constants, then the kernels of `version` (one of UNITS)."""
    if version not in UNITS:
        raise ValueError(f"version = {version!r} is unknown; choose from {UNITS}")
    return f'#define GRAPH {int(version == "graph")}\n{geometry.constants()}#include "{version}.cu"\n'


def compile_cubin(version: str, geometry: Geometry, architecture: str, cache: Path | None = None) -> bytes:
    """Machine code for an architecture such as "sm_90a"; RuntimeError with the compiler's message.

    `cache` is the folder of kept cubins; by default $XDG_CACHE_HOME/laneformer/cubins.
    """
    try:
        from cuda.bindings import nvrtc
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise RuntimeError(f"{MISSING} ({error})") from None
    source, options = source_of(version, geometry), {"arch": architecture, "std": "c++17"}
    sources = [path for folder in INCLUDES for pattern in ("*.cu*", "*.h") for path in sorted(folder.glob(pattern))]
    included = b"".join(path.read_bytes() for path in sources)
    decides = repr((source, options, nvrtc.nvrtcVersion()[1:])).encode() + included
    folder = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "laneformer" / "cubins"
    kept = folder / f"{version}-{architecture}-{hashlib.sha256(decides).hexdigest()[:20]}.cubin"
    if kept.is_file():
        return kept.read_bytes()
    try:
        settings = ProgramOptions(**options, include_path=[str(folder) for folder in INCLUDES])
        compiled = Program(source, "c++", settings).compile("cubin").code
    except Exception as error:  # cuda-core's own types, with the whole log as their message
        raise RuntimeError(f"the {version} kernels do not compile for {architecture}: {error}") from None
    keep(kept, bytes(compiled))
    return bytes(compiled)


def keep(path: Path, content: bytes) -> None:
    """Write the file whole or not at all; a folder that cannot be written costs the next start its time, no more."""
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()


def describe(device: torch.device) -> Machine:
    """What of this GPU decides the geometry; ValueError for one that is too old."""
    properties = torch.cuda.get_device_properties(device)
    architecture = 10 * properties.major + properties.minor
    if architecture < 80:
        raise ValueError(f"{properties.name} is sm_{architecture}; the CUDA engine needs sm_80 (A100) or newer")
    return Machine(properties.multi_processor_count, properties.shared_memory_per_block_optin, architecture)  # type: ignore[attr-defined]


class Kernels:
    """The kernels of one version ("persistent", "graph" or "probe") on one GPU."""

    def __init__(self, version: str, geometry: Geometry, device: torch.device):
        from cuda.core import Device, ObjectCode

        self.geometry, self.device, self.version = geometry, device, version
        self.architecture = describe(device).architecture
        name = f"sm_{self.architecture}" + ("a" if self.architecture >= 90 else "")
        with torch.cuda.device(device):  # whatever was current is so again afterwards
            Device(device.index or 0).set_current()
            self._code = ObjectCode.from_cubin(compile_cubin(version, geometry, name))
        self._kernels: dict[str, Any] = {}
        self.cooperative = version != "graph"  # the driver then promises that all blocks are resident at once

    def launch(self, name: str, argument: ctypes.Structure, blocks: int | None = None) -> None:
        """Start a kernel on torch's current stream; the graph's overlap, the others are cooperative."""
        from cuda.bindings import driver

        config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks or self.geometry.blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = 32 * self.geometry.warps, 1, 1
        config.sharedMemBytes = self.geometry.shared_bytes
        config.hStream = driver.CUstream(torch.cuda.current_stream(self.device).cuda_stream)
        ids = driver.CUlaunchAttributeID
        if self.cooperative:
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
        else:
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            overlaps = self.version == "graph" and self.architecture >= 90
            attribute.value.programmaticStreamSerializationAllowed = int(overlaps)
        config.attrs, config.numAttrs = [attribute], 1
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        check(driver.cuLaunchKernelEx(config, self._kernel(name), ctypes.addressof(pointers), 0))

    def load(self, *names: str) -> None:
        """Bring kernels to the GPU before their first launch, which may be in a capture or beside a spinning kernel."""
        from cuda.bindings import driver

        with torch.cuda.device(self.device):
            for name in names:
                function = driver.cuKernelGetFunction(self._kernel(name))
                check(function)
                check(driver.cuFuncLoad(function[1]))

    def _kernel(self, name: str) -> Any:
        if name not in self._kernels:
            from cuda.bindings import driver

            kernel = driver.CUkernel(int(self._code.get_kernel(name).handle))
            shared = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver.cuKernelSetAttribute(shared, self.geometry.shared_bytes, kernel, self.device.index or 0))
            self._kernels[name] = kernel
        return self._kernels[name]


def check(result: tuple[Any, ...]) -> None:
    """RuntimeError for a driver call that failed."""
    from cuda.bindings import driver

    if result[0] != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(result[0])
        raise RuntimeError(f"CUDA: {result[0].name}: {(text or b'').decode()}")
