"""The page of the statistics: one HTML file that needs no network, drawn by plotly, in the theme of the reader."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io
import plotly.offline

from records.files import write_atomically

FONT = 'ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif'
COLOURS = {"web": "#4f8ff7", "code": "#f0994b", "math": "#2fb5a0", "multilingual": "#c77dff", "qa": "#e5647c"}
NEUTRAL = "#8a94a6"
PHASE_COLOURS = ("#3fa9d6", "#c9a227", "#8fb339", "#e5647c")
PAIRS = 40  # of sources that share documents are shown
STYLE = (
    "body { margin:0; background:var(--page); color:var(--ink); font:15px/1.5 "
    + FONT
    + """; -webkit-text-size-adjust:100% }
:root { --page:#f6f6f3; --card:#fff; --ink:#1c2430; --soft:#5d6879; --line:#e6e6e0; --grid:#ecece7;
  color-scheme:light dark }
@media (prefers-color-scheme:dark) { :root { --page:#0f1216; --card:#171b21; --ink:#e8ebf0; --soft:#97a1b2;
  --line:#252b34; --grid:#232932 } }
* { box-sizing:border-box }
main { max-width:1080px; margin:0 auto; padding:40px 24px }
h1 { font-size:30px; line-height:1.15; letter-spacing:-.02em; margin:0 0 4px }
h2 { font-size:16px; font-weight:650; margin:0 0 2px }
p { margin:0 0 12px; color:var(--soft); font-size:13px; max-width:75ch }
section { background:var(--card); border:1px solid var(--line); border-radius:14px; padding:20px 22px; margin-top:16px;
  min-width:0 }
.tiles { display:grid; grid-template-columns:repeat(6,1fr); gap:1px; background:var(--line);
  border:1px solid var(--line); border-radius:14px; overflow:hidden; margin-top:20px }
.tiles div { background:var(--card); padding:14px 16px; font-size:12px; color:var(--soft) }
.tiles b { display:block; font-size:24px; font-weight:620; line-height:1.3; color:var(--ink); white-space:nowrap;
  letter-spacing:-.02em; font-variant-numeric:tabular-nums }
.scroll { overflow-x:auto }
table { border-collapse:collapse; font-size:13px; font-variant-numeric:tabular-nums; width:100% }
th { font-size:12px; font-weight:500; color:var(--soft); text-align:right }
td, th { padding:6px 0 6px 18px; border-bottom:1px solid var(--line); white-space:nowrap; text-align:right }
td:first-child, th:first-child { text-align:left; padding-left:0 }
tr:last-child td { border-bottom:0 }
i { display:inline-block; width:9px; height:9px; border-radius:3px; margin-right:7px }
details { border-bottom:1px solid var(--line); padding:10px 0 } details:last-child { border-bottom:0 }
summary { cursor:pointer; font-size:13px; overflow-wrap:anywhere } summary small { color:var(--soft) }
pre { font:12px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace; white-space:pre-wrap; overflow-wrap:anywhere;
  margin:10px 0 0; padding:12px 14px; background:var(--page); border-radius:10px }
.chart text { fill:var(--soft) !important } .chart .gridlayer path { stroke:var(--grid) !important }
.chart .hoverlayer path, .chart .hoverlayer .bg { fill:var(--card) !important; stroke:var(--line) !important }
.chart .hoverlayer text { fill:var(--ink) !important }
@media (max-width:700px) { main { padding:24px 12px } .tiles { grid-template-columns:repeat(2,1fr) }
  section { padding:16px 14px } h1 { font-size:25px } }
"""
)


def write(path: Path, stats: Mapping[str, Any]) -> None:
    """Write the page of what stats.json holds, whole or not at all."""
    write_atomically(path, page(stats))


def page(stats: Mapping[str, Any]) -> str:
    parts = [_tiles(stats), _shares(stats), _sources(stats), _epochs(stats), _lengths(stats), _dropped(stats)]
    body = "".join([*parts, _shared(stats), _documents(stats)])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Data</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{STYLE}</style><script>{plotly.offline.get_plotlyjs()}</script></head>"
        f"<body><main><h1>Prepared data</h1>{body}</main></body></html>"
    )


def short(value: float) -> str:
    """Three digits and a unit: 1234567 -> 1.23 M."""
    power = 0
    while abs(value) >= 999.5 and power < 4:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {' kMGT'[power]}".strip()


def count(value: int) -> str:
    return f"{value:,}" if value < 1_000_000 else short(value)


def _tiles(stats: Mapping[str, Any]) -> str:
    sources = stats["sources"].values()
    totals = {name: sum(each[name] for each in sources) for name in ("read", "documents", "tokens", "bytes", "windows")}
    tiles = {
        "sources": str(len(stats["sources"])),
        "documents kept": short(totals["documents"]),
        "of those read": f"{100 * totals['documents'] / max(totals['read'], 1):.1f} %",
        "tokens": short(totals["tokens"]),
        "bytes a token": f"{totals['bytes'] / max(totals['tokens'], 1):.2f}",
        f"windows of {stats['seq_len']:,}": short(totals["windows"]),
    }
    return '<div class="tiles">' + "".join(f"<div><b>{v}</b>{k}</div>" for k, v in tiles.items()) + "</div>"


def _section(title: str, text: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p>{escape(text)}</p>{body}</section>"


def _chart(figure: go.Figure, height: int) -> str:
    figure.update_layout(
        height=height, paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", dragmode=False,
        font={"family": FONT, "size": 12, "color": NEUTRAL}, margin={"l": 8, "r": 44, "t": 8, "b": 8},
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal"}, template="none",
        hoverlabel={"namelength": -1},
    )  # fmt: skip
    figure.update_xaxes(automargin=True, zeroline=False, fixedrange=True)
    figure.update_yaxes(automargin=True, zeroline=False, fixedrange=True)
    config = {"displayModeBar": False, "responsive": True}
    html = plotly.io.to_html(figure, config=config, include_plotlyjs=False, full_html=False, default_width="100%")
    return f'<div class="chart">{html}</div>'


def _bars(names: Sequence[str], values: Sequence[float], form: str, **options: Any) -> go.Bar:
    shown = [format(value, form) for value in values]
    hover = "%{y}: %{customdata}<extra>" + options["name"] + "</extra>"
    return go.Bar(
        y=names, x=values, orientation="h", customdata=shown, hovertemplate=hover, cliponaxis=False, **options
    )


def _shares(stats: Mapping[str, Any]) -> str:
    """Tokens of each category against what the phases ask of it."""
    sources, total = stats["sources"], sum(each["tokens"] for each in stats["sources"].values())
    names = [c for c in COLOURS if any(each["category"] == c for each in sources.values())]
    have = [100 * sum(e["tokens"] for e in sources.values() if e["category"] == c) / total for c in names]
    figure = go.Figure([_bars(names, have, ".2f", name="of the tokens here", marker={"color": NEUTRAL})])
    for (phase, each), tint in zip(stats["phases"].items(), PHASE_COLOURS, strict=False):
        shares = [100 * sum(s for n, s in each["shares"].items() if each["categories"][n] == c) for c in names]
        figure.add_trace(_bars(names, shares, ".2f", name=f"of the sequences in {phase}", marker={"color": tint}))
    figure.update_traces(texttemplate="%{customdata}", textposition="outside")
    figure.update_layout(barmode="group", bargap=0.25)
    figure.update_xaxes(ticksuffix=" %", nticks=6)
    figure.update_yaxes(autorange="reversed")
    text = "What there is, and what each phase draws from it, in percent."
    return _section("Categories", text, _chart(figure, 70 + 22 * len(names) * len(figure.data)))


def _sources(stats: Mapping[str, Any]) -> str:
    columns = {"documents": "documents", "windows": "windows", "valid_windows": "held out"}
    if any(each["quarantined"] for each in stats["sources"].values()):
        columns["quarantined"] = "quarantined"
    rows = []
    for name, each in stats["sources"].items():
        tint = f'<i style="background:{COLOURS[each["category"]]}" title="{each["category"]}"></i>'
        shares = [f"{100 * phase['shares'].get(name, 0):.2f} %" for phase in stats["phases"].values()]
        sizes = [short(each["tokens"]), *shares, f"{each['bytes'] / max(each['tokens'], 1):.2f}"]
        lengths = [f"{each['lengths']['mean']:,.0f}", count(each["lengths"]["longest"])]
        rows.append([tint + escape(name), *sizes, *lengths, *(count(each[key]) for key in columns)])
    head = ("source", "tokens", *stats["phases"], "bytes a token", "mean length", "longest", *columns.values())
    return _section("Sources", "Lengths are tokens of a document, its begin and end included.", _table(head, rows))


def _table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already."""
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def _epochs(stats: Mapping[str, Any]) -> str:
    phases = {name: each for name, each in stats["phases"].items() if "sequences" in each}
    if not phases:
        return ""
    names, before = list(stats["sources"]), dict[str, float]()
    figure = go.Figure()
    for (phase, each), tint in zip(phases.items(), PHASE_COLOURS, strict=False):
        epochs = [each["epochs_at_end"].get(n, 0) - before.get(n, 0) for n in names]
        label = f"{phase}, {each['sequences']:,} sequences"
        figure.add_trace(_bars(names, epochs, ".3f", name=label, marker={"color": tint}))
        before = each["epochs_at_end"]
    totals = [f"{before.get(name, 0):.3f}" for name in names]
    figure.data[-1].update(text=totals, textposition="outside")
    figure.update_layout(barmode="stack", bargap=0.3)
    figure.update_xaxes(nticks=6)
    figure.update_yaxes(autorange="reversed")
    text = "How often the given number of sequences of each phase reads a source, phases one after the other."
    return _section("Epochs", text, _chart(figure, 80 + 30 * len(names)))


def _lengths(stats: Mapping[str, Any]) -> str:
    figure = go.Figure()
    for category, tint in COLOURS.items():
        histograms = [e["lengths"]["histogram"] for e in stats["sources"].values() if e["category"] == category]
        counts = [sum(column) for column in zip(*histograms, strict=True)]
        if not sum(counts):
            continue
        shares, bins = [100 * count / sum(counts) for count in counts], [2**k for k in range(len(counts))]
        figure.add_trace(
            go.Scatter(
                x=bins, y=shares, name=category, mode="lines+markers", line={"color": tint},
                marker={"size": 5}, customdata=[2 * b - 1 for b in bins],
                hovertemplate="%{x:,} to %{customdata:,} tokens: %{y:.2f} %<extra>" + category + "</extra>",
            )
        )  # fmt: skip
    longest = max(each["lengths"]["longest"] for each in stats["sources"].values())
    ticks = list(range(1, longest.bit_length() + 1, 2))
    names = [f"{2**k}" if k < 10 else f"{2 ** (k - 10)} Ki" for k in ticks]
    figure.update_xaxes(type="log", tickvals=[2**k for k in ticks], ticktext=names, title="tokens")
    figure.update_xaxes(range=[0.25, math.log10(2 * longest)])
    figure.update_yaxes(ticksuffix=" %", rangemode="tozero")
    text = "Share of a category's documents by length, in bins that double."
    return _section("Lengths of documents", text, _chart(figure, 340))


def _dropped(stats: Mapping[str, Any]) -> str:
    dropped = [each["dropped"] for each in stats["sources"].values()]
    reasons = sorted({reason for counts in dropped for reason, n in counts.items() if n})
    rows = []
    for name, each in stats["sources"].items():
        counts = [each["dropped"].get(reason, 0) for reason in reasons]
        cells = [count(n) if n else "" for n in counts]
        rows.append([escape(name), count(each["read"]), *cells, f"{100 * each['kept'] / max(each['read'], 1):.2f} %"])
    head = ("source", "read", *(reason.replace("_", " ") for reason in reasons), "kept")
    return _section("Dropped", "Every document that was read is kept or counted here.", _table(head, rows))


def _shared(stats: Mapping[str, Any]) -> str:
    shared, title = stats["shared_documents"], "Documents that sources share"
    if "unknown" in shared:
        return _section(title, f"Not counted: {shared['unknown']}.", "")
    if not shared["pairs"]:
        return _section(title, "No document is in two sources.", "")
    rows = []
    for pair in shared["pairs"][:PAIRS]:
        first, second = pair["sources"]
        of = [100 * pair["documents"] / stats["sources"][name]["documents"] for name in (first, second)]
        rows.append(
            [f"{escape(first)}, {escape(second)}", f"{pair['documents']:,}", f"{of[0]:.2f} %", f"{of[1]:.2f} %"]
        )
    more = len(shared["pairs"]) - len(rows)
    text = "The same text in both, by its 128-bit hash. Within a source it would have been dropped as a duplicate."
    return _section(title, text + (f" {more} pairs more are in stats.json." if more > 0 else ""), _table(
        ("sources", "documents", "of the first", "of the second"), rows
    ))  # fmt: skip


def _documents(stats: Mapping[str, Any]) -> str:
    body, before = "", ""
    for each in stats["documents"]:
        opened = " open" if each["source"] != before else ""
        before = each["source"]
        place = f"{each['shard']}, token {each['token_offset']:,}, {each['tokens']:,} tokens"
        tint = COLOURS[stats["sources"][each["source"]]["category"]]
        title = f'<i style="background:{tint}"></i>{escape(each["source"])} <small>{place}</small>'
        body += (
            f"<details{opened}><summary>{title}</summary>"
            f"<pre>{escape(each['text'])}{'' if each['whole'] else ' …'}</pre></details>"
        )
    text = f"Drawn with the data's seed {stats['seed']}, decoded from the shards: the text that the model will see."
    return _section("A look at some documents", text, body)
