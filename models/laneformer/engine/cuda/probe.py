"""The read bandwidth of a GPU, over the very bytes that decoding reads (probe.cu)."""

from __future__ import annotations

import ctypes as c
import math

import torch

from .launch import Kernels
from .memory import DeviceMemory

KERNELS = ("stream", "loads")
LEAST_BYTES = 8 << 30  # of one launch: far more than any cache, and milliseconds, so that its start does not count
RUNS = 5


class Probe(c.Structure):
    """The kernels' argument (probe.cu: Probe)."""

    _fields_ = [
        ("tapes", c.c_void_p), ("tape_at", c.c_void_p), ("sums", c.c_void_p), ("bytes", c.c_uint64),
        ("rounds", c.c_int),
    ]  # fmt: skip


def probe_argument(memory: DeviceMemory, sums: torch.Tensor, rounds: int) -> Probe:
    """Read the device's tapes `rounds` times; `sums`: int32, one for each thread of the launch."""
    return Probe(memory.tapes.data_ptr(), memory.tape_at.data_ptr(), sums.data_ptr(), 2 * memory.tapes.numel(), rounds)


def expected_sum(memory: DeviceMemory, rounds: int) -> int:
    """What the threads' sums must add up to, modulo 2^32."""
    return int(memory.tapes.view(torch.int32).sum(dtype=torch.int64)) * rounds % 2**32


def read_bandwidth(memory: DeviceMemory, runs: int = RUNS) -> dict[str, float]:
    """Bytes/s of each kernel, the best of `runs`; RuntimeError if one of them has not read everything.

    The weights of small models stay in the L2, and so the figure is the L2's.
    """
    geometry, size = memory.geometry, 2 * memory.tapes.numel()
    kernels = Kernels("probe", geometry, memory.device)
    sums = torch.zeros(geometry.blocks * 32 * geometry.warps, dtype=torch.int32, device=memory.device)
    rounds = math.ceil(LEAST_BYTES / size)
    argument, expected = probe_argument(memory, sums, rounds), expected_sum(memory, rounds)
    best = {}
    for name in KERNELS:
        seconds = []
        for _ in range(runs + 1):
            sums.zero_()
            seconds.append(timed(kernels, name, argument))
            found = int(sums.sum(dtype=torch.int64)) % 2**32
            if found != expected:
                raise RuntimeError(f"the {name} probe read something else: sum {found}, expected {expected}")
        best[name] = rounds * size / min(seconds[1:])  # the first loads the code
    return best


def timed(kernels: Kernels, name: str, argument: c.Structure) -> float:
    """Seconds of one launch."""
    with torch.cuda.device(kernels.device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        kernels.launch(name, argument)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000
