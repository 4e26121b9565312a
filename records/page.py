"""The page kit: style sheet, script, cards, tables and number formats of every HTML page that the project writes.

A page is one file that loads nothing: the policy in its head makes the browser refuse the network. Text, grid and
background take their colours from the style sheet, in a light and a dark theme; PALETTE is for colours with a meaning.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from records.run import number

FONT = 'ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif'
PALETTE = ("#4f8ff7", "#f0994b", "#2fb5a0", "#c77dff", "#e5647c", "#8fb339", "#3fa9d6", "#c9a227")
NEUTRAL, BAD = "#8a94a6", "#d93a4e"  # legible in both themes
DASHES = ("solid", "dash", "dot")  # of curves, once the palette is used up
PLOT = {  # the layout of a plotly figure on a page
    "template": "none", "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "showlegend": False,
    "font": {"family": FONT, "size": 12, "color": NEUTRAL}, "margin": {"l": 46, "r": 10, "t": 12, "b": 56},
    "hovermode": "x unified", "hoverlabel": {"namelength": -1}, "height": 380,
}  # fmt: skip
STYLE = """
:root { --page:#f6f6f3; --card:#ffffff; --ink:#1c2430; --soft:#5d6879; --line:#e6e6e0; --grid:#ecece7; --track:#eeeeea;
  --good:#1f8a5b; --warn:#b4540a; --bad:#c6283c; color-scheme:light dark }
@media (prefers-color-scheme:dark) { :root { --page:#0f1216; --card:#171b21; --ink:#e8ebf0; --soft:#97a1b2;
  --line:#252b34; --grid:#232932; --track:#232932; --good:#4cc38a; --warn:#f0a45d; --bad:#ff7585 } }
* { box-sizing:border-box }
body { margin:0; background:var(--page); color:var(--ink); font-size:15px; line-height:1.5;
  -webkit-text-size-adjust:100% }
main { max-width:1240px; margin:0 auto; padding:40px 24px 24px }
article + article, .card + article { margin-top:72px }
h1 { font-size:32px; line-height:1.15; letter-spacing:-.02em; margin:0; overflow-wrap:anywhere }
h2 { font-size:15px; font-weight:650; margin:0 0 12px } .card > h3 { margin:22px 0 8px; color:var(--ink) }
h3, th { font-size:12px; font-weight:500; color:var(--soft); margin:0; text-align:left }
small, .facts, .caption, .chips, footer { color:var(--soft); font-size:13px }
table, b, strong, dd, small { font-variant-numeric:tabular-nums } footer { text-align:center; padding:12px 0 }
.title { display:flex; flex-wrap:wrap; align-items:center; gap:8px 16px }
.state { font-size:13px; padding:3px 12px 3px 10px; border-radius:99px; background:var(--card);
  border:1px solid var(--line) }
.state::before { content:""; display:inline-block; width:8px; height:8px; border-radius:50%; margin-right:8px;
  background:var(--soft) }
.state.live::before, .state.done::before { background:var(--good) } body.stale .state::before { background:var(--warn) }
.state.live::before { box-shadow:0 0 0 4px color-mix(in srgb,var(--good) 22%,transparent) }
.facts { margin:10px 0 20px; display:flex; flex-wrap:wrap; gap:2px 20px }
.progress { display:flex; flex-wrap:wrap; gap:6px; margin-bottom:20px } .progress > div { min-width:max-content }
.progress small { white-space:nowrap; display:block; margin-top:4px } .progress b { color:var(--ink); font-weight:600 }
.bar { background:var(--track); border-radius:4px; height:8px; overflow:hidden; position:relative }
.bar i { display:block; height:100%; border-radius:4px }
.bar u { position:absolute; top:0; bottom:0; width:3px; margin-left:-1.5px; background:var(--card) }
.tiles { display:grid; grid-template-columns:repeat(6,1fr); gap:1px; background:var(--line); overflow:hidden;
  border:1px solid var(--line); border-radius:14px; margin:0 0 16px }
.tiles > div { background:var(--card); padding:16px 18px } .tiles small { display:block; font-size:12px;
  line-height:1.35 }
.tiles strong { display:block; font-size:26px; line-height:1.3; font-weight:620; letter-spacing:-.02em }
.tiles strong .none { font-size:15px; line-height:34px; font-weight:400; letter-spacing:0; display:block }
.none { color:var(--soft); font-style:italic } .missing, .chips b.missing { color:var(--bad) }
.card { background:var(--card); border:1px solid var(--line); border-radius:14px; padding:20px 22px; margin-bottom:16px;
  min-width:0 }
.caption { margin:12px 0 0 } h1 + .tiles { margin-top:20px }
.pair { display:grid; grid-template-columns:1fr 1fr; gap:0 16px }
.stack .bits { display:grid; grid-template-columns:1fr 1fr; gap:0 40px; align-items:center }
.chips { margin:0 0 4px; display:flex; flex-wrap:wrap; gap:2px 16px } .chips b { color:var(--ink) }
.chip i, summary i { display:inline-block; width:10px; height:10px; border-radius:3px; margin-right:7px }
.chip i.line { width:26px; height:0; border-radius:0; vertical-align:middle }
.row { display:grid; grid-template-columns:minmax(84px,150px) 1fr 64px; gap:14px; align-items:center; padding:5px 0 }
.row span { line-height:1.25; overflow-wrap:anywhere } .row small { display:block; font-size:12px }
.row .bar { height:14px } .row b { text-align:right; font-weight:600 }
.scroll { overflow-x:auto; margin:0 -22px; padding:0 22px } .scroll + .scroll { margin-top:22px }
table { border-collapse:collapse; width:100%; font-size:13px }
td, th { padding:6px 20px 6px 0; border-bottom:1px solid var(--line); white-space:nowrap; vertical-align:top }
tr:last-child td { border-bottom:0 } .numbers td + td, .numbers th + th { text-align:right; padding:6px 0 6px 18px }
code, pre { font:12px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace }
details { border-top:1px solid var(--line); padding:10px 0 } summary { cursor:pointer; font-size:13px }
pre { white-space:pre-wrap; overflow-wrap:anywhere; margin:10px 0 0; padding:12px 14px; background:var(--page);
  border-radius:10px }
.warnings { margin:0 0 16px; padding:12px 16px 12px 34px; border-radius:14px; font-size:13px; color:var(--warn);
  border:1px solid color-mix(in srgb,var(--warn) 40%,transparent) }
.chart { width:100%; min-width:0 } .chart > div { height:100% } .wide .chart { min-width:600px }
.chart text { fill:var(--soft) !important } .chart text.annotation-text { fill:var(--ink) !important }
.chart .gridlayer path { stroke:var(--grid) !important }
.chart .hoverlayer .bg { fill:var(--card) !important; fill-opacity:.96 !important; stroke:var(--line) !important;
  stroke-opacity:1 !important } .chart .hoverlayer text { fill:var(--ink) !important }
.chart .hoverlayer path { fill:var(--card) !important; stroke:var(--line) !important }
.chart .spikeline { stroke:var(--soft) !important; stroke-width:1px !important; opacity:.5 }
.chart .updatemenu-button rect { fill:var(--card) !important; stroke:var(--line) !important }
.bullet { margin-bottom:26px } .bullet h3 { margin-bottom:8px } .bullet .bar, .bullet .bar i { height:28px;
  border-radius:7px } .scale { display:flex; justify-content:space-between; margin-top:6px }
.bullet dl { display:grid; grid-template-columns:repeat(auto-fill,minmax(150px,1fr)); gap:16px; margin:22px 0 6px }
.bullet dt { font-size:12px; color:var(--soft) } .bullet dd { margin:0; font-size:17px; font-weight:600 }
@media (max-width:1000px) { .tiles { grid-template-columns:repeat(3,1fr) }
  .pair, .stack .bits { grid-template-columns:1fr } }
@media (max-width:600px) { main { padding:24px 12px } h1 { font-size:26px } .tiles { grid-template-columns:1fr 1fr }
  .card { padding:16px 14px } .scroll { margin:0 -14px; padding:0 14px } .row { gap:10px }
  .tiles > div { padding:12px 14px } .tiles strong { font-size:22px } }
/* a touch scrolls the page; a chart as tall as the screen must not catch it */
@media (hover:none) and (pointer:coarse) { .chart rect.drag { pointer-events:none !important } }
"""
# `draw` draws every chart from the JSON beside it; `update` swaps in a newer <main> and keeps the elements of the
# charts, with their zoom and the chosen axis
SCRIPT = """
const CONFIG = {responsive: true, displayModeBar: false};
async function draw(root) {
  for (const text of root.querySelectorAll('.chart > script')) {
    const place = document.getElementById(text.previousElementSibling.id), figure = JSON.parse(text.textContent);
    const before = place.layout, active = before?.updatemenus?.[0]?.active ?? 0;
    const range = before?.xaxis?.autorange === false ? before.xaxis.range.slice() : null;
    await Plotly.react(place, figure.data, figure.layout, CONFIG);
    if (active) {
      await Plotly.update(place, ...structuredClone(place.layout.updatemenus[0].buttons[active].args));
      await Plotly.relayout(place, {'updatemenus[0].active': active});
    }
    if (range) await Plotly.relayout(place, {'xaxis.range': range});
  }
}
async function update(text) {
  const fresh = document.createElement('main'), old = document.querySelector('main');
  fresh.innerHTML = text;
  for (const place of fresh.querySelectorAll('.chart > div')) {
    const drawn = document.getElementById(place.id);
    if (drawn) place.replaceWith(drawn);
  }
  old.replaceWith(fresh);
  await draw(fresh);
}
async function poll(every_ms) {
  let version = document.body.dataset.version;
  for (;;) {
    await new Promise(done => setTimeout(done, every_ms));
    try {
      const answer = await fetch('data.json?version=' + version);
      if (answer.status === 200) { const news = await answer.json(); version = news.version; await update(news.main); }
      document.body.classList.remove('stale');
    } catch (lost) { document.body.classList.add('stale'); }
  }
}
draw(document);
"""


def html_page(title: str, body: str, library: str, live: str = "", version: str = "", connect: str = "'none'") -> str:
    """A whole page around the inner HTML of <main>.

    library: plotly.js. live: script that keeps the page up to date. connect: hosts that it may fetch from.
    """
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
    policy += f"; connect-src {connect}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}"><link rel="icon" href="data:,">
<style>body {{ font-family:{FONT} }} {STYLE}</style><script>{library}</script></head>
<body data-version="{version}"><main>{body}</main><script>{SCRIPT}{live}</script></body></html>
"""


def colour(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def dash(index: int) -> str:
    return DASHES[index // len(PALETTE) % len(DASHES)]


def card(title: str, body: str, caption: str = "") -> str:
    """body and caption are HTML."""
    below = f'<p class="caption">{caption}</p>' if caption else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{body}{below}</section>'


def none(text: str = "not measured") -> str:
    return f'<span class="none">{escape(text)}</span>'


def missing(text: str, reason: Any = "") -> str:
    return f'<span class="missing" title="{escape(str(reason))}">{escape(text)}</span>'


def tiles(entries: Iterable[tuple[str, str, str]]) -> str:
    """entries: (name, figure as HTML, note)."""
    cells = (
        f"<div><h3>{escape(n)}</h3><strong>{value}</strong><small>{note}</small></div>" for n, value, note in entries
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def chip(tint: str, text: str) -> str:
    return f'<span class="chip"><i style="background:{tint}"></i>{escape(text)}</span>'


def line_chip(index: int, text: str) -> str:
    """The chip of curve `index`, in its colour and dash."""
    style = {"solid": "solid", "dash": "dashed", "dot": "dotted"}[dash(index)]
    return (
        f'<span class="chip"><i class="line" style="border-top:3px {style} {colour(index)}"></i>{escape(text)}</span>'
    )


def table(head: Iterable[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Cells are HTML; kind "numbers" aligns all columns but the first to the right."""
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def chart(figure: Any, name: str) -> str:
    """A plotly figure: an empty element named `name`, and beside it the JSON that the page's script draws into it."""
    content = figure.to_json().replace("</", "<\\/")  # the text must not end the element that it stands in
    place = f'<div id="{escape(name)}"></div><script type="application/json">{content}</script>'
    return f'<div class="chart" style="height:{figure.layout.height}px">{place}</div>'


def measured(value: Any, form: str = ",.0f", unit: str = "") -> str:
    """A figure as text, "not measured" where there is none."""
    known = number(value)
    return none() if known is None else f"{known:{form}}{unit}"


def short(value: Any, unit: str = "") -> str:
    """A large figure with three digits and its SI prefix: 1234567 -> 1.23 M."""
    known, power = number(value), 0
    if known is None:
        return none()
    while abs(known) >= 999.5 and power < 4:
        known, power = known / 1000, power + 1
    return f"{known:.3g} {' kMGT'[power].strip()}{unit}".strip()


def percent(share: Any, form: str = ".1f") -> str:
    """A share of 1 in percent."""
    known = number(share)
    return measured(None if known is None else 100 * known, form, " %")


def utc(seconds: Any) -> str:
    known = number(seconds)
    return none() if known is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(known))


def code(value: Any) -> str:
    """A hash or path in monospace; long hexadecimal is cut, the whole of it is in the tooltip."""
    if value is None or value == "":
        return none("not recorded")
    text = str(value)
    cut = text[:12] + "…" if len(text) > 24 and set(text) <= set("0123456789abcdef") else text
    return f'<code title="{escape(text)}">{escape(cut)}</code>'
