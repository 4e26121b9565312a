"""Load CUDA kernels, check that their blocks can be resident together, and launch them."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ..device import driver_version
from .compile import compile_cubin
from .geometry import Geometry, Machine, architecture_name


class NotResident(RuntimeError):
    """The blocks of a launch, which wait for each other, would not all run at once."""


def describe(device: torch.device) -> Machine:
    """Return the properties that decide the geometry; raise ValueError for a GPU too old, or AMD's."""
    if torch.version.hip:
        raise ValueError(
            'this PyTorch is for AMD GPUs, the CUDA engine for NVIDIA\'s; use device "cpu"'
        )
    properties: Any = torch.cuda.get_device_properties(device)
    architecture = 10 * properties.major + properties.minor
    if architecture < 80:
        raise ValueError(
            f"{properties.name} is sm_{architecture}; the CUDA engine needs sm_80 (A100) or newer"
        )
    return Machine(
        properties.multi_processor_count, properties.shared_memory_per_block_optin, architecture
    )


def share_of(devices: Sequence[torch.device]) -> tuple[Machine, int]:
    """Return what each device has of its GPU, and the most devices that share one GPU."""
    machine, sharing = describe(devices[0]), max(map(list(devices).count, devices))
    return dataclasses.replace(machine, multiprocessors=machine.multiprocessors // sharing), sharing


class Kernels:
    def __init__(
        self, version: str, geometry: Geometry, device: torch.device, shared: bool = False
    ):
        """Compile and load the kernels.

        Args:
            shared: Other launches wait for this one's blocks and run beside them on the same GPU.
        """
        from cuda.bindings import driver

        self.geometry, self.device, self.version = geometry, device, version
        self.machine = describe(device)
        # The driver then promises that all blocks are resident at once; but two such launches
        # may not overlap.
        self.cooperative = version == "passes" and not shared
        cubin = compile_cubin(
            version, geometry, architecture_name(self.machine.architecture), driver=driver_version()
        )
        torch.cuda.synchronize(device)  # makes the GPU's context, and this thread's current one
        self._library = check(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
        self._kernels: dict[str, Any] = {}

    def launch(self, name: str, argument: ctypes.Structure, blocks: int | None = None) -> None:
        """Start a kernel on torch's current stream; raise NotResident where it does not fit."""
        from cuda.bindings import driver

        config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks or self.geometry.blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.geometry.threads, 1, 1
        config.sharedMemBytes = self.geometry.shared_bytes
        config.hStream = driver.CUstream(torch.cuda.current_stream(self.device).cuda_stream)
        ids = driver.CUlaunchAttributeID
        if self.cooperative:
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
        else:
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            overlaps = self.version == "graph" and self.machine.architecture >= 90
            attribute.value.programmaticStreamSerializationAllowed = int(overlaps)
        config.attrs, config.numAttrs = [attribute], 1
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        check(driver.cuLaunchKernelEx(config, self._kernel(name), ctypes.addressof(pointers), 0))

    def load(self, *names: str) -> None:
        """Load kernels before their first launch, which may be in a capture."""
        from cuda.bindings import driver

        registers = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
        with torch.cuda.device(self.device):
            # who asks for a number of the code has it loaded; cuFuncLoad needs a driver of 12.4
            for name in names:
                function = check(driver.cuKernelGetFunction(self._kernel(name)))
                check(driver.cuFuncGetAttribute(registers, function))

    def require_resident(self, name: str, launches: int = 1) -> None:
        """Raise NotResident where the GPU cannot hold all blocks of so many launches at once."""
        from cuda.bindings import driver

        threads, shared = self.geometry.threads, self.geometry.shared_bytes
        function = driver.CUfunction(int(self._kernel(name)))
        available = self.machine.multiprocessors
        with torch.cuda.device(self.device):
            blocks_each = check(
                driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, shared)
            )
        if blocks_each * available < launches * self.geometry.blocks:
            raise NotResident(
                f"{launches * self.geometry.blocks} blocks of {threads} threads and {shared} bytes of shared memory "
                f"have to run at once, and {available} multiprocessors hold {blocks_each} each"
            )

    def _kernel(self, name: str) -> Any:
        if name not in self._kernels:
            from cuda.bindings import driver

            kernel = check(driver.cuLibraryGetKernel(self._library, name.encode()))
            attributes = driver.CUfunction_attribute
            values = {
                attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: self.geometry.shared_bytes
            }
            # percent of the memory that is also the L1: equal for all, as a change between kernels
            # drains the GPU
            values[attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT] = 100
            for attribute, value in values.items():
                check(driver.cuKernelSetAttribute(attribute, value, kernel, self.device.index or 0))
            self._kernels[name] = kernel
        return self._kernels[name]


def check(result: tuple[Any, ...]) -> Any:
    """Return the values of a driver call; raise NotResident or RuntimeError."""
    from cuda.bindings import driver

    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        too_large = status == driver.CUresult.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
        raise (NotResident if too_large else RuntimeError)(
            f"CUDA: {status.name}: {(text or b'').decode()}"
        )
    return values[0] if values else None
