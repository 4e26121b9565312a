"""Which GPU, with which clocks and versions."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from typing import Any

import torch

PACKAGES = ("torch", "transformers", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "numpy")
QUERIES = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit")


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Name, sizes, clocks under load and versions."""
    properties = torch.cuda.get_device_properties(device)
    work(device)
    clocks = nvidia_smi(device.index or 0)
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "kernel": platform.release(),
        **clocks,
        **{name: version(name) for name in PACKAGES},
    }


def work(device: torch.device) -> None:
    """Some hundred milliseconds of it, so that the clocks are not those of idleness; it may still run on return."""
    matrix = torch.ones(8192, 8192, device=device, dtype=torch.bfloat16)
    for _ in range(200):
        matrix = matrix @ matrix * 1e-4


def nvidia_smi(index: int) -> dict[str, str]:
    """What torch does not tell; empty where nvidia-smi is missing."""
    command = ["nvidia-smi", f"--id={index}", f"--query-gpu={','.join(QUERIES)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(QUERIES, values, strict=True)) if len(values) == len(QUERIES) else {}


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
