"""Of which part of a GPU's memory bandwidth a speed is; only the standard library is imported.

t = bytes / bandwidth + layers x c
"""

from __future__ import annotations

from .cards import card_of_device


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


def datasheet(device: str) -> float | None:
    """Bytes/s that the maker states for the memory of a GPU of this name; None where cards.toml has it not."""
    card = card_of_device(device)
    return None if card is None else card.bandwidth_bytes_per_s
