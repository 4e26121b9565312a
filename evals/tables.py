"""The tables that evaluations print on stderr, beside the record on stdout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

console = Console(stderr=True)
console.width = max(console.width, 80)  # what is narrower wraps lines, and loses no column


def show_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1
) -> None:
    """Print a table: the first `texts` columns aligned left, numbers aligned right."""
    table = Table(title=title, box=SIMPLE, padding=(0, 0))
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place < texts else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
