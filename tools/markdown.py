"""Write Markdown tables, as the commands print them and append them to pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table: first column left, the others right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)


def records(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of rows; the first row's keys are the columns."""
    return table([name.replace("_", " ") for name in rows[0]], [list(row.values()) for row in rows])


def cell(value: Any) -> str:
    """Format a value: text unchanged, numbers with three digits."""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if not isinstance(value, (int, float)):
        return "-" if value is None else str(value)
    # commas from 100 on, powers of 1,000 from a million on
    if abs(value) < 100:
        return f"{value:.3g}" if isinstance(value, float) else str(value)
    return f"{value:,.0f}" if abs(value) < 1e6 else Decimal(f"{value:.4g}").to_eng_string()
