"""Lets TorchTitan 0.2.2 train without an accelerator (laptops, CI): the few places where it assumes one.

Imported before torchtitan, and only where there is no accelerator. Nothing here changes a result.
"""

from __future__ import annotations

import os
import resource
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils


def patch_torch_for_cpu() -> None:
    """Teach torch to answer "cpu" where TorchTitan asks which device there is."""
    torch._utils._get_available_device_type = lambda: "cpu"
    cpu: Any = torch.cpu
    cpu.get_device_name = lambda device=None: "cpu"
    cpu.get_device_properties = lambda device=None: SimpleNamespace(
        name="cpu", total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    cpu.memory_stats = _memory_stats
    cpu.reset_peak_memory_stats = lambda device=None: None
    cpu.empty_cache = lambda: None
    cpu.current_device = lambda: 0  # torch.cpu's own returns "cpu", which barrier(device_ids=...) refuses


def _memory_stats(device: Any = None) -> dict[str, int]:
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"active_bytes.all.peak": peak_bytes, "reserved_bytes.all.peak": peak_bytes}
