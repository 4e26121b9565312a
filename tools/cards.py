"""The inputs of every calculator: cards.toml, the datasheet of GPUs and what is assumed of software on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tomli

Row = dict[str, Any]  # value, unit, kind, source


@cache
def tables() -> dict[str, Any]:
    return tomli.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Card:
    """One GPU; NaN where the datasheet has no row."""

    name: str
    bandwidth_bytes_per_s: float
    memory_bytes: float = math.nan
    peak_flops: float = math.nan  # bf16, dense
    link_bytes_per_s: float = math.nan  # NVLink or its like, in each direction
    usable_bandwidth: float = math.nan  # as the published ceilings take it
    published_tokens_per_s: float = math.nan


@dataclass(frozen=True)
class Inputs:
    """Every row by its dotted name: h200.memory_bytes, link.custom_s."""

    rows: Mapping[str, Row]

    @classmethod
    def read(cls, replaced: Mapping[str, float] | None = None) -> Inputs:
        """The file's rows, some replaced. ValueError for a name that it lacks."""
        groups = {name: group for name, group in tables().items() if name not in ("cards", "large")}
        groups |= {name.lower(): group for name, group in tables()["cards"].items()}
        rows = {f"{group}.{name}": row for group, found in groups.items() for name, row in found.items()}
        for name, value in (replaced or {}).items():
            if name not in rows:
                raise ValueError(f"no input {name!r}; choose from {', '.join(rows)}")
            rows[name] = {**rows[name], "value": value, "kind": "given", "source": "the command line"}
        return cls(rows)

    def at(self, name: str) -> float:
        value: float = self.rows[name]["value"]
        return value

    def cards(self, *needed: str) -> list[Card]:
        """Every GPU that has these rows, in the file's order."""
        return [
            Card(name, **{row: self.rows[f"{name.lower()}.{row}"]["value"] for row in rows})
            for name, rows in tables()["cards"].items()
            if rows.keys() >= set(needed)
        ]

    def card(self, name: str, *needed: str) -> Card:
        """The GPU of this name, or the first whose name starts with it, in any case.

        ValueError for an unknown name, or where one of the rows `needed` is missing; it lists the cards that have them.
        """
        complete = self.cards(*needed)
        matching = [card for card in complete if card.name.lower().startswith(name.lower())]
        if not matching:
            rows = f" with {', '.join(needed)}" if needed else ""
            known = ", ".join(card.name for card in complete)
            raise ValueError(f"no datasheet{rows} of GPU {name!r}; choose from {known}")
        return min(matching, key=lambda card: len(card.name))

    def card_of_device(self, device: str) -> Card | None:
        """The GPU that a driver calls `device`, such as NVIDIA H100 80GB HBM3."""
        return next((card for card in self.cards() if card.name.lower() in device.lower()), None)


INPUTS = Inputs.read()


def input_rows(rows: Mapping[str, Row]) -> list[Row]:
    """For a table: every input, its value, unit, kind and source."""
    return [
        {
            "input": name,
            "value": f"{row['value']:g}",
            **{about: row[about] for about in ("unit", "kind", "source")},
        }
        for name, row in rows.items()
    ]
