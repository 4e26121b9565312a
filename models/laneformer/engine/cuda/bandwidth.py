"""Of which part of a GPU's memory bandwidth a speed is; only the standard library is imported.

t = bytes / bandwidth + layers x c
"""

from __future__ import annotations

DATASHEET = (  # bytes/s of the memory, by a part of the GPU's name; the first that fits
    ("GB200", 8.0e12), ("B200", 8.0e12), ("GH200 144G", 4.9e12), ("GH200", 4.0e12), ("H200", 4.8e12),
    ("H100 NVL", 3.938e12), ("H100 PCIe", 2.039e12), ("H100", 3.35e12), ("A100-SXM4-80GB", 2.039e12),
    ("A100 80GB PCIe", 1.935e12), ("A100-SXM4-40GB", 1.555e12), ("A100-PCIE-40GB", 1.555e12), ("L40S", 0.864e12),
    ("RTX 5090", 1.792e12), ("RTX 4090", 1.008e12), ("RTX 3090", 0.936e12),
)  # fmt: skip


def shares(
    tokens_per_s: float, bytes_per_token: float, probe: float, datasheet: float | None, gpus: int, layers: int
) -> dict[str, float | None]:
    """How much of the bandwidth (bytes/s; `datasheet` of one GPU) a speed is, and the time a
    layer that is not.
    """
    rate = bytes_per_token * tokens_per_s
    return {
        "percent_of_probe": 100 * rate / probe,
        "percent_of_datasheet": None if datasheet is None else 100 * rate / (gpus * datasheet),
        "exposed_us_per_layer": 1e6 * (1 / tokens_per_s - bytes_per_token / probe) / layers,
    }


def datasheet(name: str) -> float | None:
    """Bytes/s that the maker states for a GPU of this name; None where the table has it not."""
    return next((rate for part, rate in DATASHEET if part in name), None)
