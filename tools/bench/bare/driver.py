"""NVIDIA's driver through ctypes: what it finds, memory, kernels, waits with an end (cuda.h).

Calls are those of CUDA 11, which every later driver has: what is missing is said by this file and not by a
loader.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

LIBRARY = "libcuda.so.1"
NOT_READY, NO_DEVICE = 600, 100
ATTRIBUTES = {  # CUdevice_attribute
    "multiprocessors": 16, "display_limits_launches": 17, "l2_bytes": 38, "shared_bytes": 97, "cooperative": 95,
    "clock_khz": 13, "memory_clock_khz": 36, "memory_bus_bits": 37,
}  # fmt: skip
MAJOR, MINOR = 75, 76
MAX_SHARED, CARVEOUT = 8, 9  # CUfunction_attribute
PINNED = 3  # portable, and in the device's addresses
POLL_S = 0.00005


class Failure(RuntimeError):
    """Something that the verdict names: `what`, and why."""

    def __init__(self, what: str, why: str):
        super().__init__(f"{what}: {why}")
        self.what, self.why = what, why


class Driver:
    """The first GPU. Whatever fails is a Failure with the driver's own words."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            how = "install NVIDIA's driver; in a container, start it with --gpus all"
            raise Failure("no driver", f"{error}; {how}") from None
        version, count = c_int(), c_int()
        self.call("cuDriverGetVersion", byref(version))
        self.version = version.value
        status = self._library.cuInit(0) or self._library.cuDeviceGetCount(byref(count))
        if status or not count.value:
            why = "" if status in (0, NO_DEVICE) else f"{self._said(status)}; "
            how = "see nvidia-smi and CUDA_VISIBLE_DEVICES"
            raise Failure("no GPU", f"{why}the driver for CUDA {self.named_version} finds none; {how}")
        self.gpus, self._device, self._context = count.value, c_int(), c_void_p()
        self.call("cuDeviceGet", byref(self._device), 0)

    @property
    def named_version(self) -> str:
        return f"{self.version // 1000}.{self.version % 1000 // 10}"

    def facts(self) -> dict[str, Any]:
        """Of the GPU: name, architecture such as 90, memory, and ATTRIBUTES."""
        name, memory = ctypes.create_string_buffer(256), c_size_t()
        self.call("cuDeviceGetName", name, 256, self._device)
        self.call("cuDeviceTotalMem_v2", byref(memory), self._device)
        return {
            "gpu": name.value.decode(), "architecture": 10 * self.attribute(MAJOR) + self.attribute(MINOR),
            "memory_bytes": memory.value, "driver": self.version, "gpus": self.gpus,
            **{name: self.attribute(number) for name, number in ATTRIBUTES.items()},
        }  # fmt: skip

    def attribute(self, number: int) -> int:
        value = c_int()
        self.call("cuDeviceGetAttribute", byref(value), number, self._device)
        return value.value

    def start(self) -> None:
        """Make the context and a stream."""
        self.call("cuDevicePrimaryCtxRetain", byref(self._context), self._device)
        self.call("cuCtxSetCurrent", self._context)
        self._stream, self._events = c_void_p(), (c_void_p(), c_void_p())
        self.call("cuStreamCreate", byref(self._stream), 0)  # waits for what is copied and cleared before
        for event in self._events:
            self.call("cuEventCreate", byref(event), 0)

    def call(self, name: str, *arguments: Any) -> None:
        if (function := getattr(self._library, name, None)) is None:
            raise Failure("driver too old", f"it has no {name}; it is for CUDA {self.named_version}")
        if status := function(*arguments):
            raise Failure("the driver", f"{name} gave {self._said(status)}")

    def _said(self, status: int) -> str:
        name, text = c_char_p(), c_char_p()
        self._library.cuGetErrorName(status, byref(name))
        self._library.cuGetErrorString(status, byref(text))
        return f"{status} {(name.value or b'').decode()} ({(text.value or b'').decode()})"

    # ---- memory ----

    def zeros(self, count: int) -> int:
        """The address of so many bytes of the GPU."""
        at = c_uint64()
        self.call("cuMemAlloc_v2", byref(at), c_size_t(count))
        self.clear(at.value, count)
        return at.value

    def clear(self, at: int, count: int) -> None:
        self.call("cuMemsetD8_v2", c_uint64(at), ctypes.c_ubyte(0), c_size_t(count))

    def upload(self, content: bytes) -> int:
        at = self.zeros(len(content))
        self.call("cuMemcpyHtoD_v2", c_uint64(at), content, c_size_t(len(content)))
        return at

    def download(self, at: int, count: int) -> bytes:
        content = ctypes.create_string_buffer(count)
        self.call("cuMemcpyDtoH_v2", content, c_uint64(at), c_size_t(count))
        return content.raw

    def pinned(self, kind: Any) -> tuple[Any, int]:
        """A ctypes object in the host's memory, which kernels reach too, and its address."""
        at = c_void_p()
        self.call("cuMemHostAlloc", byref(at), c_size_t(ctypes.sizeof(kind)), PINNED)
        assert at.value is not None
        ctypes.memset(at.value, 0, ctypes.sizeof(kind))
        return kind.from_address(at.value), at.value

    # ---- kernels ----

    def kernels(self, code: bytes, *names: str, shared_bytes: int) -> list[c_void_p]:
        """Functions of one cubin; Failure where this GPU or driver does not take it."""
        module, functions = c_void_p(), [c_void_p() for _ in names]
        self.call("cuModuleLoadData", byref(module), code)
        for function, name in zip(functions, names, strict=True):
            self.call("cuModuleGetFunction", byref(function), module, name.encode())
            self.call("cuFuncSetAttribute", function, MAX_SHARED, shared_bytes)
            self.call("cuFuncSetAttribute", function, CARVEOUT, 100)
        return functions

    def resident(self, function: c_void_p, threads: int, shared_bytes: int) -> int:
        """Blocks that a multiprocessor holds at once."""
        blocks = c_int()
        name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        self.call(name, byref(blocks), function, threads, c_size_t(shared_bytes))
        return blocks.value

    def launch(
        self, function: c_void_p, blocks: int, threads: int, shared_bytes: int, argument: ctypes.Structure
    ) -> None:
        """All blocks at once, or not at all; the events say how long it took."""
        pointers = (c_void_p * 1)(ctypes.addressof(argument))
        self.call("cuEventRecord", self._events[0], self._stream)
        shape = (blocks, 1, 1, threads, 1, 1, shared_bytes)
        self.call("cuLaunchCooperativeKernel", function, *shape, self._stream, pointers)
        self.call("cuEventRecord", self._events[1], self._stream)

    def wait(self, kernel: str, limit_s: float, look: Callable[[], None] | None = None) -> None:
        """Until the launch has ended. Failure "hang" where it does not: the process cannot go on then."""
        end_s = time.monotonic() + limit_s
        while status := self._library.cuStreamQuery(self._stream):
            if status != NOT_READY:
                raise Failure("the driver", f"the {kernel} kernel gave {self._said(status)}")
            if time.monotonic() > end_s:
                raise Failure("hang", f"the {kernel} kernel has not ended within {limit_s:g} s")
            if look:
                look()
            time.sleep(POLL_S)

    def seconds(self) -> float:
        """Of the last launch."""
        ms = c_float()
        self.call("cuEventElapsedTime", byref(ms), *self._events)
        return ms.value / 1000
