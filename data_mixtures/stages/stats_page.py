"""The page of the statistics of prepared data: one HTML file that needs no network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from records.page import NEUTRAL, PLOT, card, chart, chip, colour, html_page, none, percent, short, table, tiles

PAIRS = 40  # of sources that share documents are shown


def page(stats: Mapping[str, Any]) -> str:
    """The page of what stats.json holds."""
    parts = (_tiles, _shares, _sources, _epochs, _lengths, _dropped, _shared, _documents)
    return html_page("Data", "<h1>Prepared data</h1>" + "".join(part(stats) for part in parts), get_plotlyjs())


def colours(stats: Mapping[str, Any]) -> dict[str, str]:
    categories = dict.fromkeys(each["category"] for each in stats["sources"].values())
    return {category: colour(index) for index, category in enumerate(categories)}


def count(value: int) -> str:
    return f"{value:,}" if value < 1_000_000 else short(value)


def _tiles(stats: Mapping[str, Any]) -> str:
    sources = stats["sources"].values()
    total = {key: sum(each[key] for each in sources) for key in ("read", "documents", "tokens", "bytes", "windows")}
    return tiles((
        ("sources", str(len(sources)), ""),
        ("documents", short(total["documents"]), "kept"),
        ("kept", percent(total["documents"] / max(total["read"], 1)), "of the documents read"),
        ("tokens", short(total["tokens"]), ""),
        ("bytes per token", f"{total['bytes'] / max(total['tokens'], 1):.2f}", ""),
        ("windows", short(total["windows"]), f"of {stats['seq_len']:,} tokens"),
    ))  # fmt: skip


def _chart(figure: go.Figure, name: str, height: int) -> str:
    legend = {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0, "traceorder": "normal"}
    look = {"height": height, "dragmode": False, "hovermode": "closest", "showlegend": len(figure.data) > 1}
    figure.update_layout(PLOT | look | {"legend": legend, "margin": {"l": 8, "r": 44, "t": 8, "b": 8}})
    for update in (figure.update_xaxes, figure.update_yaxes):
        update(automargin=True, zeroline=False, fixedrange=True)
    if figure.data[0].type == "bar":  # the first name on top
        figure.update_layout(xaxis_nticks=6, yaxis_autorange="reversed")
    return chart(figure, name)


def _bars(names: Sequence[str], values: Sequence[float], form: str, name: str, tint: str) -> go.Bar:
    shown, hover = [format(value, form) for value in values], "%{y}: %{customdata}<extra>" + name + "</extra>"
    look = {"orientation": "h", "cliponaxis": False, "marker": {"color": tint}, "hovertemplate": hover}
    return go.Bar(y=names, x=values, customdata=shown, name=name, **look)


def _shares(stats: Mapping[str, Any]) -> str:
    """Tokens of each category against what the phases ask of it."""
    sources, total = stats["sources"], sum(each["tokens"] for each in stats["sources"].values())
    names = list(colours(stats))
    have = [100 * sum(e["tokens"] for e in sources.values() if e["category"] == c) / total for c in names]
    figure = go.Figure([_bars(names, have, ".2f", "of the tokens here", NEUTRAL)])
    for index, (phase, each) in enumerate(stats["phases"].items()):
        shares = [100 * sum(s for n, s in each["shares"].items() if each["categories"][n] == c) for c in names]
        figure.add_trace(_bars(names, shares, ".2f", f"of the sequences in {phase}", colour(5 + index)))
    figure.update_traces(texttemplate="%{customdata}", textposition="outside")
    figure.update_layout(barmode="group", bargap=0.25, xaxis_ticksuffix=" %")
    body = _chart(figure, "categories", 70 + 22 * len(names) * len(figure.data))
    return card("Categories", body, "What there is, and what each phase draws from it, in percent.")


def _sources(stats: Mapping[str, Any]) -> str:
    columns = {"documents": "documents", "windows": "windows", "valid_windows": "held out"}
    if any(each["quarantined"] for each in stats["sources"].values()):
        columns["quarantined"] = "quarantined"
    rows, tints = [], colours(stats)
    for name, each in stats["sources"].items():
        shares = [percent(phase["shares"].get(name, 0), ".2f") for phase in stats["phases"].values()]
        sizes = [short(each["tokens"]), *shares, f"{each['bytes'] / max(each['tokens'], 1):.2f}"]
        lengths = [f"{each['lengths']['mean']:,.0f}", count(each["lengths"]["longest"])]
        rows.append([chip(tints[each["category"]], name), *sizes, *lengths, *(count(each[key]) for key in columns)])
    head = ("source", "tokens", *stats["phases"], "bytes per token", "mean length", "longest", *columns.values())
    legend = " ".join(chip(tint, category) for category, tint in tints.items())
    caption = f"Lengths are tokens of a document, including those that begin and end it. Colours: {legend}"
    return card("Sources", table(head, rows, "numbers"), caption)


def _epochs(stats: Mapping[str, Any]) -> str:
    phases = {name: each for name, each in stats["phases"].items() if "sequences" in each}
    if not phases:
        return ""
    names, before = list(stats["sources"]), dict[str, float]()
    figure = go.Figure()
    for index, (phase, each) in enumerate(phases.items()):
        epochs = [each["epochs_at_end"].get(n, 0) - before.get(n, 0) for n in names]
        figure.add_trace(_bars(names, epochs, ".3f", f"{phase}, {each['sequences']:,} sequences", colour(5 + index)))
        before = each["epochs_at_end"]
    totals = [f"{before.get(name, 0):.3f}" for name in names]
    figure.data[-1].update(text=totals, textposition="outside")
    figure.update_layout(barmode="stack", bargap=0.3)
    caption = "How often the given number of sequences of each phase reads a source, phases one after the other."
    return card("Epochs", _chart(figure, "epochs", 80 + 30 * len(names)), caption)


def _lengths(stats: Mapping[str, Any]) -> str:
    figure = go.Figure()
    for category, tint in colours(stats).items():
        histograms = [e["lengths"]["histogram"] for e in stats["sources"].values() if e["category"] == category]
        counts = [sum(column) for column in zip(*histograms, strict=True)]
        if not sum(counts):
            continue
        shares, bins = [100 * n / sum(counts) for n in counts], [2**k for k in range(len(counts))]
        hover = "%{x:,} to %{customdata:,} tokens: %{y:.2f} %<extra>" + category + "</extra>"
        look = {"mode": "lines+markers", "line": {"color": tint}, "marker": {"size": 5}, "hovertemplate": hover}
        figure.add_trace(go.Scatter(x=bins, y=shares, customdata=[2 * b - 1 for b in bins], name=category, **look))
    longest = max(each["lengths"]["longest"] for each in stats["sources"].values())
    ticks = list(range(1, longest.bit_length() + 1, 2))
    names = [f"{2**k}" if k < 10 else f"{2 ** (k - 10)} Ki" for k in ticks]
    figure.update_xaxes(type="log", tickvals=[2**k for k in ticks], ticktext=names, title="tokens")
    figure.update_xaxes(range=[0.25, math.log10(2 * longest)])
    figure.update_yaxes(ticksuffix=" %", rangemode="tozero")
    caption = "Share of a category's documents by length, in bins that double."
    return card("Lengths of documents", _chart(figure, "lengths", 340), caption)


def _dropped(stats: Mapping[str, Any]) -> str:
    dropped = [each["dropped"] for each in stats["sources"].values()]
    reasons = sorted({reason for counts in dropped for reason, n in counts.items() if n})
    rows = []
    for name, each in stats["sources"].items():
        cells = [count(n) if (n := each["dropped"].get(reason, 0)) else "" for reason in reasons]
        rows.append([escape(name), count(each["read"]), *cells, percent(each["kept"] / max(each["read"], 1), ".2f")])
    head = ("source", "read", *(reason.replace("_", " ") for reason in reasons), "kept")
    return card("Dropped", table(head, rows, "numbers"), "Every document that was read is kept or counted here.")


def _shared(stats: Mapping[str, Any]) -> str:
    shared, title = stats["shared_documents"], "Documents that sources share"
    if "unknown" in shared:
        return card(title, none(f"Not counted: {shared['unknown']}."))
    if not shared["pairs"]:
        return card(title, "No document is in two sources.")
    rows = []
    for pair in shared["pairs"][:PAIRS]:
        of = [pair["documents"] / stats["sources"][name]["documents"] for name in pair["sources"]]
        rows.append([escape(", ".join(pair["sources"])), f"{pair['documents']:,}", *(percent(s, ".2f") for s in of)])
    more = len(shared["pairs"]) - len(rows)
    caption = "The same text in both, by its 128-bit hash. Within a source it would have been dropped as a duplicate."
    caption += f" {more} more pairs are in stats.json." if more > 0 else ""
    return card(title, table(("sources", "documents", "of the first", "of the second"), rows, "numbers"), caption)


def _documents(stats: Mapping[str, Any]) -> str:
    body, before, tints = "", "", colours(stats)
    for each in stats["documents"]:
        opened = " open" if each["source"] != before else ""
        before = each["source"]
        place = f"{each['shard']}, token {each['token_offset']:,}, {each['tokens']:,} tokens"
        title = f"{chip(tints[stats['sources'][before]['category']], before)} <small>{place}</small>"
        text = f"{escape(each['text'])}{'' if each['whole'] else ' …'}"
        body += f"<details{opened}><summary>{title}</summary><pre>{text}</pre></details>"
    caption = f"Drawn with the data's seed {stats['seed']}, decoded from the shards: the text that the model will see."
    return card("A look at some documents", body, caption)
