"""Write cards, tables and figures of an HTML page; page.css styles it, page.js draws the charts.

Text, grid and background take their colours from the style sheet; PALETTE has those with a meaning.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from records.run import number

FONT = 'ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif'
PALETTE = ("#4f8ff7", "#f0994b", "#2fb5a0", "#c77dff", "#e5647c", "#8fb339", "#3fa9d6", "#c9a227")
# of curves, once the palette is used up
DASHES = ("solid", "dash", "dot")
# name, figure as HTML, note
Tile = tuple[str, str, str]
STYLE, SCRIPT = (
    Path(__file__).with_suffix(end).read_text(encoding="utf-8") for end in (".css", ".js")
)


def write_html(title: str, body: str, library: str) -> str:
    """Write a whole page around the inner HTML of <main>. library: plotly.js."""
    # one file that loads nothing: the browser refuses the network
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}"><link rel="icon" href="data:,">
<style>body {{ font-family:{FONT} }} {STYLE}</style><script>{library}</script></head>
<body><main>{body}</main><script>{SCRIPT}</script></body></html>
"""


def colour(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def dash(index: int) -> str:
    return DASHES[index // len(PALETTE) % len(DASHES)]


def card(title: str, body: str, caption: str = "") -> str:
    """Write a card; `body` and `caption` are HTML."""
    below = f'<p class="caption">{caption}</p>' if caption else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{body}{below}</section>'


def write_chart_card(
    title: str, content: dict[str, Any] | None, name: str, caption: str = ""
) -> str:
    """Write the card of a chart alone; "" without any figure."""
    return card(title, chart(content, name), caption) if content else ""


def none(text: str = "not measured") -> str:
    return f'<span class="none">{escape(text)}</span>'


def fold(summary: str, body: str) -> str:
    """Write a `body` that a click on `summary` shows; both are HTML."""
    return f"<details><summary>{summary}</summary>{body}</details>"


def missing(text: str) -> str:
    return f'<span class="missing">{escape(text)}</span>'


def tiles(entries: Iterable[Tile]) -> str:
    tile = "<div><h3>{}</h3><strong>{}</strong><small>{}</small></div>"
    divs = [tile.format(escape(name), *rest) for name, *rest in entries]
    return f'<div class="tiles">{"".join(divs)}</div>' if divs else ""


def table(head: Iterable[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Write a table of HTML cells. kind: "numbers" (all but the first to the right), "wrap"."""
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    top = "".join(f"<th>{escape(title)}</th>" for title in head)
    return f'<div class="scroll"><table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def chart(content: dict[str, Any], name: str) -> str:
    """Write a chart under its legend and buttons: an empty element, and JSON for the script."""
    # whatever a name holds, it must not end the element that it stands in
    text = json.dumps(content, allow_nan=False).replace("<", "\\u003c")
    place = f'<div id="{escape(name)}"></div><script type="application/json">{text}</script>'
    return f'<div class="figure"><div class="tools"></div><div class="chart">{place}</div></div>'


def format_figure(value: Any, form: str, unit: str = "") -> str:
    """Format a figure, or return "not measured"."""
    figure = number(value)
    return none() if figure is None else f"{figure:{form}}{unit}"


def short(value: Any) -> str:
    """Format a figure with three digits and its SI prefix: 1234567 -> 1.23 M."""
    figure, power = number(value), 0
    if figure is None:
        return none()
    while abs(figure) >= 999.5 and power < 4:
        figure, power = figure / 1000, power + 1
    return f"{figure:.3g} {' kMGT'[power]}".strip()


def percent(share: Any, form: str = ".1f") -> str:
    """Format a share of 1 in percent."""
    figure = number(share)
    return format_figure(figure and 100 * figure, form, " %")


def utc(seconds: Any) -> str:
    time_s = number(seconds)
    return none() if time_s is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(time_s))
