"""Pieces of the dashboard's page that are HTML: figures as text, tables, and the cards of what was evaluated."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from records.run import Run, number
from tools.dashboard.charts import colour, to_div
from tools.dashboard.overlays import bits_figure, line_of, sources_figure, sources_of


def measured(value: Any, form: str = ",.0f", unit: str = "") -> str:
    """A figure as text, "not measured" where there is none."""
    known = number(value)
    return '<span class="none">not measured</span>' if known is None else f"{known:{form}}{unit}"


def short(value: Any, unit: str = "") -> str:
    """A large figure with three digits and its SI prefix: 1234567 -> 1.23 M."""
    known = number(value)
    if known is None:
        return measured(None)
    power = min(4, int(math.log10(abs(known)) // 3)) if abs(known) >= 1000 else 0
    return f"{known / 1000**power:.3g} {' kMGT'[power].strip()}{unit}".strip()


def utc(seconds: Any) -> str:
    known = number(seconds)
    return measured(None) if known is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(known))


def card(title: str, body: str, caption: str = "") -> str:
    below = f'<p class="caption">{caption}</p>' if caption else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{body}{below}</section>'


def chip(tint: str, text: str) -> str:
    return f'<span class="chip"><i style="background:{tint}"></i>{escape(text)}</span>'


def line_chip(index: int, text: str) -> str:
    """The chip of a curve that `line_of(index)` draws, dashes and all."""
    line = line_of(index)
    style = {"solid": "solid", "dash": "dashed", "dot": "dotted"}[line["dash"]]
    return (
        f'<span class="chip"><i class="line" style="border-top:3px {style} {line["color"]}"></i>{escape(text)}</span>'
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already."""
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def bits_card(run: Run) -> str:
    evals = [e for e in run.evals_of("bits_per_byte") if isinstance(e.get("sources"), dict)]
    if not evals:
        return card("Bits per byte", '<p class="none">not measured</p>')
    sources = evals[-1]["sources"]
    names = sorted(sources, key=lambda name: number(sources[name].get("bits_per_byte")) or 0.0)
    longest = max((number(sources[n].get("bits_per_byte")) or 0.0 for n in names), default=0) or 1.0
    bars = ""
    for index, name in enumerate(names):
        value = number(sources[name].get("bits_per_byte"))
        fill = f'<i style="width:{100 * (value or 0) / longest:.2f}%;background:{colour(index)}"></i>'
        label = f"{escape(name)}<small>{escape(str(sources[name].get('category', '')))}</small>"
        text = measured(value, ".3f")
        bars += f'<div class="row"><span>{label}</span><div class="bar">{fill}</div><b>{text}</b></div>'
    curves = to_div(bits_figure(evals, names), f"bits-{run.name}", "low") if len(evals) > 1 else ""
    caption = f"Held-out text through the decode engine, {where_evaluated(evals[-1])}. Lower is better."
    return card("Bits per byte", f'<div class="bits"><div class="rows">{bars}</div>{curves}</div>', caption)


def where_evaluated(record: dict[str, Any]) -> str:
    parts = [str(record["phase"])] if record.get("phase") else []
    parts += [f"step {record['step']:,}"] if number(record.get("step")) is not None else []
    return " ".join(parts) or "checkpoint not recorded"


def decode_card(run: Run) -> str:
    """Decode speed as a part of what reading the weights at the measured bandwidth would allow."""
    records = run.evals_of("decode_speed")[-2:]
    if not records:
        return card("Decode speed", '<p class="none">not measured</p>')
    caption = "Batch 1. At full bandwidth every byte of a token is read once, as fast as a probe read in the same run."
    if any((number(record.get("percent_of_probe")) or 0) > 100 for record in records):
        caption += " Beyond it weights come from the processor's caches, into which the probe's buffer does not fit."
    return card("Decode speed", "".join(map(bullet, reversed(records))), caption)


def spread(low: Any, high: Any) -> str:
    return f"{short(low)} – {short(high)}" if number(low) is not None else measured(None)


def bullet(record: dict[str, Any]) -> str:
    """One measured decode speed: its bar on the scale of the bandwidth, and the figures behind it."""
    speed, percent, ttft_s = (number(record.get(key)) for key in ("tokens_per_s", "percent_of_probe", "ttft_s"))
    per_token, bandwidth = (number(record.get(key)) for key in ("bytes_per_token", "probe_bytes_per_s"))
    ceiling = bandwidth / per_token if bandwidth and per_token else None
    names = [str(record[key]) for key in ("device", "cpu", "dtype", "isa") if record.get(key)]
    names += [f"{record['threads']} threads"] if record.get("threads") else []
    entries = (
        ("read bandwidth", short(bandwidth, "B/s")),
        ("read for each token", short(per_token, "B")),
        ("of the bandwidth", measured(percent, ".1f", " %")),
        ("10th to 90th percentile", spread(record.get("tokens_per_s_p10"), record.get("tokens_per_s_p90"))),
        ("one token", measured(1000 / speed if speed else None, ".3g", " ms")),
        ("first token after", measured(ttft_s and 1000 * ttft_s, ".3g", " ms")),
        ("prefill", short(record.get("prefill_tokens_per_s"), " tok/s")),
    )
    scale = max(100.0, percent or 0) / 100
    limit = f'<u style="left:{100 / scale:.2f}%"></u>' if scale > 1 else ""  # where the bandwidth ends
    behind = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in entries)
    return (
        f'<div class="bullet"><h3>{escape(" · ".join([*names, where_evaluated(record)]))}</h3>'
        f'<div class="bar"><i style="width:{(percent or 0) / scale:.2f}%;background:{colour(0)}"></i>{limit}</div>'
        f'<small class="scale"><span><b>{short(speed)}</b> tokens/s</span>'
        f'<span>full bandwidth: {short(ceiling)}</span></small><dl class="facts-of">{behind}</dl></div>'
    )


def code(value: Any) -> str:
    """A hash or path in monospace; long hexadecimal is cut, the whole of it is in the tooltip."""
    if value is None or value == "":
        return '<span class="none">not recorded</span>'
    text = str(value)
    cut = text[:12] + "…" if len(text) > 24 and set(text) <= set("0123456789abcdef") else text
    return f'<code title="{escape(text)}">{escape(cut)}</code>'


def sources_card(run: Run, index: int) -> str:
    """What each source contributed, and how well it is predicted, in training and on held-out windows."""
    names = sources_of(run)
    if not any(row["loss_by_source"] for row in run.kept_rows):
        return card("Loss by source", '<p class="none">not measured</p>')
    last = {key: _last_of(run, key) for key in ("loss_by_source", "valid_loss_by_source", "tokens_by_source")}
    tokens = last["tokens_by_source"]
    total = sum(number(count) or 0.0 for count in tokens.values()) or 1.0
    rows = []
    for place, name in enumerate(names):
        count = number(tokens.get(name))
        share = None if count is None else 100 * count / total
        cells = [line_chip(place, name), short(count), measured(share, ".1f", " %")]
        rows.append([*cells, *(measured(last[key].get(name), ".4f") for key in list(last)[:2])])
    head = ("source", "tokens seen", "share", "last logged loss", "last validation loss")
    figure = to_div(sources_figure(run), f"sources-{index}", "middle")
    caption = "Lines: smoothed loss of the training batches. Diamonds: the same held-out windows each time."
    return card("Loss by source", figure + table(head, rows), caption)


def _last_of(run: Run, key: str) -> dict[str, Any]:
    """The last value of every name under `key`."""
    found: dict[str, Any] = {}
    for row in run.kept_rows:
        found |= row[key]
    return found
