"""A CUDA driver for one card without a GPU: refuses blocks that cannot be resident, records launches."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from laneformer.engine.cuda import launch
from laneformer.engine.cuda.structures import Probe, decode_structure
from tests.laneformer.cuda.cards import CARDS, REGISTERS
from tests.laneformer.cuda.harness import KERNELS

STREAM = 0x5EED
NOT_READY, TOO_LARGE = 600, 720  # CUresult in cuda.h
H200 = CARDS["H100 SXM, NVL, H200, GH200"]
NAMES = {**KERNELS, "probe": ("stream",)}


@dataclass
class Kernel:
    name: str
    registers: int
    argument_bytes: int
    max_shared: int = 48 * 1024
    carveout: int = -1
    loaded: bool = False


def argument_of(version, geometry) -> type[ctypes.Structure]:
    return Probe if version == "probe" else decode_structure(geometry.devices)


# Structures and enumerations are those of cuda-bindings. Machine code is taken to need the
# registers of __launch_bounds__ and the size of the argument.
class FakeDriver:
    """Replaces the driver, and what the engine uses of torch.cuda."""

    def __init__(self, monkeypatch, card=H200, version: int = 13000):
        from cuda.bindings import driver

        self.driver, self.card, self.version = driver, card, version
        self.max_blocks = 1 << 30  # of a cooperative launch: fewer where others use the GPU as well
        # of a kernel's thread; of others as many as __launch_bounds__ allow
        self.registers: dict[str, int] = {}
        self.launch_statuses: Iterator[int] = iter(())  # of the next launches
        self.stream_status = 0
        self.kernels, self.launches = list[Kernel](), list[dict[str, Any]]()
        for name in filter(lambda name: name.startswith("cu"), dir(self)):
            monkeypatch.setattr(driver, name, getattr(self, name))
        monkeypatch.setattr(launch, "compile_cubin", self.compile)
        monkeypatch.setattr(launch, "driver_version", lambda: self.version)
        self._replace_torch(monkeypatch)

    def compile(self, version, geometry, architecture, driver: int) -> list[Kernel]:
        assert (architecture.rstrip("a"), driver) == (f"sm_{self.card.architecture}", self.version)
        threads, size = 32 * geometry.warps, ctypes.sizeof(argument_of(version, geometry))
        kernels = []
        for name in NAMES[version]:
            resident = 2 if version == "graph" and name != "choose" else 1
            # what __launch_bounds__ leaves to a thread, in steps of 8
            limit = min(255, REGISTERS // (threads * resident) // 8 * 8)
            kernels.append(Kernel(name, self.registers.get(name, limit), size))
        return kernels

    # ---- what cuda-bindings offers ----

    def cuLibraryLoadData(self, cubin: list[Kernel], *_):
        return self._return_status(cubin)

    def cuLibraryGetKernel(self, library: list[Kernel], name: bytes):
        self.kernels.append(next(kernel for kernel in library if kernel.name == name.decode()))
        return self._return_status(self.driver.CUkernel(len(self.kernels) - 1))

    def cuKernelSetAttribute(self, attribute, value: int, kernel, _: int):
        attributes = self.driver.CUfunction_attribute
        if attribute == attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
            self.kernels[int(kernel)].max_shared = value
        if attribute == attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
            self.kernels[int(kernel)].carveout = value
        return self._return_status()

    def cuKernelGetFunction(self, kernel):
        return self._return_status(kernel)

    def cuFuncGetAttribute(self, _, function):
        self.kernels[int(function)].loaded = True
        return self._return_status(self.kernels[int(function)].registers)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function, threads, shared: int):
        return self._return_status(self._resident(self.kernels[int(function)], threads, shared))

    def cuLaunchKernelEx(self, config, handle, pointers: int, _: int):
        if status := next(self.launch_statuses, 0):
            return self._return_status(status=status)
        kernel, threads = self.kernels[int(handle)], config.blockDimX
        resident = self._resident(kernel, threads, config.sharedMemBytes)
        attributes = {int(attribute.id): attribute.value.cooperative for attribute in config.attrs}
        # all blocks of a cooperative launch must be resident at once, or a driver refuses it
        limit = min(self.max_blocks, resident * self.card.multiprocessors)
        if (
            attributes.get(int(self.driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE))
            and config.gridDimX > limit
        ):
            return self._return_status(status=TOO_LARGE)
        argument = ctypes.string_at(
            ctypes.c_void_p.from_address(pointers).value, kernel.argument_bytes
        )
        self.launches.append(
            {
                **vars(kernel),
                "grid": [config.gridDimX, config.gridDimY, config.gridDimZ],
                "block": [threads, config.blockDimY, config.blockDimZ],
                "shared": config.sharedMemBytes,
                "stream": int(config.hStream),
                "resident": resident,
                "attributes": attributes,
                "argument": argument,
            }
        )
        return self._return_status()

    def cuGetErrorString(self, status):
        return self._return_status(f"fake error {int(status)}".encode())

    def _return_status(self, *values, status: int = 0):
        return self.driver.CUresult(status), *values

    def _resident(self, kernel, threads, shared: int) -> int:
        warp_registers = -(-kernel.registers * 32 // 256) * 256
        of_registers = REGISTERS // warp_registers // -(-threads // 32)
        of_shared = self.card.shared_total // (-(-(shared + 1024) // 128) * 128)
        return min(of_shared, self.card.threads // threads, of_registers)

    # ---- torch.cuda ----

    def _replace_torch(self, monkeypatch):
        stream = SimpleNamespace(cuda_stream=STREAM, query=self._query, synchronize=lambda: None)
        properties = SimpleNamespace(
            name="fake",
            major=self.card.architecture // 10,
            minor=self.card.architecture % 10,
            multi_processor_count=self.card.multiprocessors,
            shared_memory_per_block_optin=self.card.shared_block,
        )
        graph = SimpleNamespace(replay=lambda: None)
        functions = {
            "get_device_properties": lambda device: properties,
            "synchronize": lambda *device: None,
            "device": contextlib.nullcontext,
            "stream": contextlib.nullcontext,
            "current_stream": lambda device: stream,
            "Stream": lambda device: stream,
            "mem_get_info": lambda device: (1 << 40, 1 << 40),
            "CUDAGraph": lambda: graph,
            "graph": lambda *arguments, **options: contextlib.nullcontext(),
        }
        for name, value in functions.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def _query(self) -> bool:
        if self.stream_status not in (0, NOT_READY):
            raise RuntimeError(
                f"CUDA error: fake error {self.stream_status}\nFor debugging consider CUDA_LAUNCH_BLOCKING=1"
            )
        return self.stream_status == 0
