"""Choose the devices of an engine, without importing torch where there is no NVIDIA driver."""

from __future__ import annotations

import ctypes
import importlib.util
import re

DRIVER = "libcuda.so.1"


def cuda_devices(device: str) -> tuple[str, ...]:
    """Return the GPUs that `device` means, such as ("cuda:0", "cuda:1"); empty for the CPU.

    Raises ValueError for other values than "auto", "cpu", "cuda", "cuda:0", "cuda:0,cuda:1"..., and where
    something must be installed first.
    """
    # "auto" is the CPU: nobody should get unproven kernels without asking
    if device in ("auto", "cpu"):
        return ()
    names = device.split(",") if isinstance(device, str) else []
    if not names or not all(re.fullmatch(r"cuda(:\d+)?", name) for name in names):
        raise ValueError(
            f"device = {device!r} is unknown; choose 'auto', 'cpu', 'cuda' or 'cuda:0,cuda:1' for several"
        )
    if reason := why_no_cuda():
        raise ValueError(f"device = {device!r}: {reason}; or use device = 'cpu'")
    import torch

    numbers = [int(name.partition(":")[2] or 0) for name in names]
    if len(set(numbers)) < len(numbers) or max(numbers) >= torch.cuda.device_count():
        raise ValueError(
            f"device = {device!r}: name each GPU once, of the {torch.cuda.device_count()} that are here"
        )
    return tuple(f"cuda:{number}" for number in numbers)


def why_no_cuda() -> str | None:
    """Return what the CUDA engine lacks on this machine, and the remedy; None: nothing."""
    driver = driver_version()
    if driver is None:
        return f"there is no NVIDIA driver ({DRIVER}) on this machine"
    for module in ("torch", "cuda.bindings"):
        if not is_installed(module):
            return f"the package {module} is not installed: pip install 'laneformer[cuda]'"
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install a build with it"
    if int(torch.version.cuda.partition(".")[0]) > driver // 1000:
        return (
            f"torch {torch.__version__} needs a driver for CUDA {torch.version.cuda}, this one is for CUDA "
            f"{driver // 1000}.{driver % 1000 // 10}: install a newer driver, or torch for CUDA {driver // 1000}"
        )
    if not torch.cuda.is_available():
        return "torch finds no GPU that it can use; see nvidia-smi and CUDA_VISIBLE_DEVICES"
    return None


def has_driver() -> bool:
    return driver_version() is not None


def driver_version() -> int | None:
    """Return the driver's CUDA version, such as 12040 for 12.4; None without a driver."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL(DRIVER).cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return version.value


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False
