"""Datasheets of GPUs from cards.toml, for the engine and the tools; imports the standard library only."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Card:
    """One GPU, as its maker states it."""

    name: str
    source: str
    bandwidth_bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float  # in each direction
    peak_flops: float = math.nan  # bf16, dense; NaN where its maker does not say


TEXT = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
CARDS = [Card(name, **row) for name, row in tomllib.loads(TEXT).items()]  # noqa: TID251 neither job nor recipe


def card_named(name: str) -> Card:
    """Return the shortest-named card whose name starts with `name` in any case; raise ValueError for none."""
    matching = [card for card in CARDS if card.name.lower().startswith(name.lower())]
    if not matching:
        names = ", ".join(card.name for card in CARDS)
        raise ValueError(f"no datasheet of GPU {name!r}; choose from {names}")
    return min(matching, key=lambda card: len(card.name))


def card_of_device(device: str) -> Card | None:
    """Return the card of a driver's device name, such as NVIDIA H100 80GB HBM3; None if not in the table."""
    return next((card for card in CARDS if card.name.lower() in device.lower()), None)
