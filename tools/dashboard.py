"""One self-contained HTML page of a run: what was trained, how it went, what was measured.

    python -m tools.dashboard runs/demo --out runs/demo/dashboard.html

The page is one file without any outside host: plotly.js stands in it, and its own policy lets the browser refuse the
network. What has no figure says "not measured". dashboard_run.py reads, dashboard_charts.py draws.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Annotated, Any

import tyro
from plotly.offline import get_plotlyjs

from evals.records import PROVENANCE
from laneformer import LaneformerConfig
from laneformer.provenance import write_atomically
from tools.dashboard_charts import (
    BUCKETS,
    STYLE,
    attempts_of,
    bits_figure,
    colour,
    comparison_figure,
    half_life_rows,
    restarts,
    to_div,
    training_figure,
)
from tools.dashboard_run import Run, number, read_run

# what of the job's config is worth a line
SETTINGS = (
    "model.flavor", "training.steps", "training.global_batch_size", "training.local_batch_size", "training.seq_len",
    "training.max_norm", "training.mixed_precision_param", "optimizer.name", "optimizer.lr", "optimizer.beta1",
    "optimizer.beta2", "optimizer.eps", "optimizer.weight_decay", "lr_scheduler.warmup_steps",
    "lr_scheduler.decay_ratio", "lr_scheduler.decay_type", "lr_scheduler.min_lr_factor", "mixture.lock",
    "parallelism.data_parallel_shard_degree", "parallelism.data_parallel_replicate_degree", "compile.enable",
    "checkpoint.interval", "checkpoint.initial_load_path",
)  # fmt: skip


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


def page(runs: Sequence[Run], now: float) -> str:
    """The whole page as text. The policy in its head lets the browser itself refuse any outside host."""
    charts = [charts_of(run, index) for index, run in enumerate(runs)]  # first: they smooth the losses
    sections = [run_section(run, charts[index], now) for index, run in enumerate(runs)]
    if len(runs) > 1:
        chips = "".join(chip(colour(i), run.name) for i, run in enumerate(runs))
        figure = to_div(comparison_figure(runs), "comparison", "middle")
        sections.insert(0, card("Loss of all runs", f'<p class="chips">{chips}</p>{figure}', "Smoothed, over tokens."))
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
    title = escape(" · ".join(run.name for run in runs))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}"><link rel="icon" href="data:,">
<style>{STYLE}</style><script>{get_plotlyjs()}</script></head>
<body><main>{"".join(sections)}<footer>Drawn {utc(now)} UTC from the files of the run.</footer></main></body></html>
"""


def card(title: str, body: str, caption: str = "") -> str:
    below = f'<p class="caption">{caption}</p>' if caption else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{body}{below}</section>'


def chip(tint: str, text: str) -> str:
    return f'<span class="chip"><i style="background:{tint}"></i>{escape(text)}</span>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already."""
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def run_section(run: Run, charts: str, now: float) -> str:
    warnings = "".join(f"<li>{escape(warning)}</li>" for warning in run.warnings)
    told = f'<ul class="warnings">{warnings}</ul>' if warnings else ""
    layout = "stack" if len(run.evals_of("bits_per_byte")) > 1 else "pair"  # curves over checkpoints need the width
    measurements = f'<div class="{layout}">{bits_card(run)}{decode_card(run)}</div>'
    parts = (header(run, now), told, tiles(run), charts, measurements, evaluations_card(run))
    return f"<article>{''.join(parts)}{provenance_card(run)}</article>"


def planned_steps(run: Run) -> dict[str, int | None]:
    """Steps that each phase is configured for, in the order of the run; None where no config says it."""
    phases = list(dict.fromkeys([*run.phases, *run.configs]))
    return {phase: run.configs.get(phase, {}).get("training", {}).get("steps") for phase in phases}


def state(run: Run, now: float) -> tuple[str, str]:
    """(CSS class, words) for where the run stands, from its last logged step and its configs."""
    if not run.kept_rows:
        return "idle", "no step logged yet"
    row, planned = run.kept_rows[-1], planned_steps(run)
    steps = planned[row["phase"]]
    where = f"{row['phase']}, step {row['step']:,}" + (f" of {steps:,}" if steps else "")
    if steps == row["step"] and row["phase"] == list(planned)[-1]:
        return "done", f"finished: {where}"
    if row["time"] is None:
        return "idle", where
    age_s = max(0.0, now - row["time"])
    return ("live", f"training: {where}") if age_s < 600 else ("idle", f"quiet since {utc(row['time'])} UTC: {where}")


def header(run: Run, now: float) -> str:
    kind, words = state(run, now)
    facts = [*model_facts(run), *(f"git {version}" for version in code_versions(run)[-1:])]
    if run.kept_rows and run.kept_rows[-1]["x_tokens"] is not None:
        facts.append(f"{short(run.kept_rows[-1]['x_tokens'])} tokens")
    bars = []
    for index, (phase, steps) in enumerate(planned_steps(run).items()):
        done = max((row["step"] for row in run.kept_rows if row["phase"] == phase), default=0)
        share = 100 * min(1.0, done / steps) if steps else 100.0
        label = f"{escape(phase)} <b>{done:,}</b>" + (f" / {steps:,}" if steps else "")
        bars.append(
            f'<div style="flex:{steps or done or 1}"><div class="bar"><i style="width:{share:.2f}%;'
            f'background:{colour(index)}"></i></div><small>{label}</small></div>'
        )
    line = "".join(f"<span>{escape(str(fact))}</span>" for fact in facts)
    return (
        f'<header><div class="title"><h1>{escape(run.name)}</h1><span class="state {kind}">{escape(words)}</span></div>'
        f'<p class="facts">{line}</p><div class="progress">{"".join(bars)}</div></header>'
    )


def model_facts(run: Run) -> list[str]:
    flavor = next((c["model"]["flavor"] for c in run.configs.values() if c.get("model", {}).get("flavor")), "")
    if not run.model:
        return [f"Laneformer {flavor}".strip()]
    try:
        model = LaneformerConfig.from_dict(run.model)
    except (TypeError, ValueError) as error:
        run.warnings.append(f"model.json does not describe a Laneformer: {error}")
        return [f"Laneformer {flavor}".strip()]
    total = model.parameter_count()["total"]
    sizes = f"{model.num_hidden_layers} layers × {model.hidden_size}"
    lanes = f"{model.num_lanes} lanes, delay {model.broadcast_delay}"
    return [f"Laneformer {flavor}".strip(), f"{short(total)} parameters", sizes, lanes]


def code_versions(run: Run) -> list[str]:
    """Git commits that the run's starts and evaluations name, without repeats, in the order of the files."""
    return list(dict.fromkeys(str(r["code_version"]) for r in (*run.evals, *run.attempts) if r.get("code_version")))


def tiles(run: Run) -> str:
    row = run.kept_rows[-1] if run.kept_rows else {}
    loss_rows = [r for r in run.kept_rows if r["loss"] is not None]
    bits, decode = (next(iter(run.evals_of(kind)[-1:]), {}) for kind in ("bits_per_byte", "decode_speed"))
    speed = number(decode.get("tokens_per_s"))
    last_loss = loss_rows[-1] if loss_rows else {"loss": None}
    first = f"from {loss_rows[0]['loss']:.3f} at step {loss_rows[0]['x_step']:,.0f}" if loss_rows else "nothing logged"
    entries = (
        ("loss", measured(last_loss["loss"], ".4f"), first),
        ("bits per byte", measured(bits.get("bits_per_byte"), ".4f"), "held-out text, all sources"),
        ("training speed", short(row.get("tokens_per_s")), "tokens per second"),
        ("MFU", measured(row.get("mfu"), ".1f", " %"), "of the hardware's peak FLOP/s"),
        ("decode", measured(speed, ",.0f" if (speed or 0) >= 100 else ".3g"), "tokens per second at batch 1"),
        ("bandwidth used", measured(decode.get("percent_of_probe"), ".0f", " %"), "of the measured read speed"),
    )
    cells = (
        f"<div><h3>{name}</h3><strong>{value}</strong><small>{note}</small></div>" for name, value, note in entries
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def charts_of(run: Run, index: int) -> str:
    if not run.kept_rows:
        return card("Training", '<p class="none">not measured: metrics.jsonl has no rows yet</p>')
    figure = training_figure(run)
    attempts = attempts_of(run)
    chips = "".join(chip(colour(i), f"{phase} · attempt {n}") for i, (phase, n) in enumerate(attempts))
    logged = sum(len(s.rows) for s in run.stretches)
    again = logged - len(run.kept_rows)
    caption = (
        f"{logged:,} logged steps; bold is the exponential mean (half-life {half_life_rows(run):.3g} logged steps), "
        f"faint the logged value."
    )
    if logged >= 500:
        caption += " The loss axis leaves out the steepest start and the tips of spikes."
    if again:
        caption += f" Dotted: {again:,} logged steps that a restart or a roll-back ran again; they count no more. "
    if restarts(run):
        caption += " ↻ marks where an attempt took over."
    if logged > 4 * BUCKETS:
        caption += f" Drawn from {BUCKETS} groups of neighbouring steps, of each the extremes; every spike is kept."
    body = f'<p class="chips">{chips}</p>{to_div(figure, f"training-{index}", "tall")}'
    return card("Training", body, caption + " Drag to zoom, double-click for everything.")


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


def evaluations_card(run: Run) -> str:
    """Every evaluation on record, the newest first."""
    rows = []
    for record in reversed(run.evals):
        figures = {k: number(v) for k, v in record.items() if k not in PROVENANCE}
        known = [(k, v) for k, v in figures.items() if v is not None]
        preferred = ("bits_per_byte", "loss", "tokens_per_s", "percent_of_probe")
        known.sort(key=lambda item: preferred.index(item[0]) if item[0] in preferred else len(preferred))
        result = ", ".join(f"{k} {v:.4g}" for k, v in known[:2]) or "no figures"
        cells = [record.get("kind", "?"), where_evaluated(record), result]
        rest = [short(record.get("tokens_total")), measured(record.get("seconds"), ".1f", " s")]
        rest += [utc(record.get("time")), code(record.get("code_version"))]
        rows.append([*(escape(str(c)) for c in cells), *rest])
    head = ("evaluation", "checkpoint", "result", "tokens", "took", "time (UTC)", "code")
    return card("Evaluations", table(head, rows) if rows else '<p class="none">not measured</p>')


def code(value: Any) -> str:
    """A hash or path in monospace; long hexadecimal is cut, the whole of it is in the tooltip."""
    if value is None or value == "":
        return '<span class="none">not recorded</span>'
    text = str(value)
    cut = text[:12] + "…" if len(text) > 24 and set(text) <= set("0123456789abcdef") else text
    return f'<code title="{escape(text)}">{escape(cut)}</code>'


def provenance_card(run: Run) -> str:
    """Where the figures come from: data, tokenizer and code by hash, the starts of the job, its settings by phase."""
    keys = {"tokenizer_sha256": "tokenizer", "data_sha256": "evaluation data", "code_version": "evaluation code"}
    facts = {title: [e[key] for e in run.evals if e.get(key)] for key, title in keys.items()}
    facts["mixture"] = [a["mixture_fingerprint"] for a in run.attempts if a.get("mixture_fingerprint")]
    facts |= {key: [value] for key, value in run.lineage.items() if isinstance(value, str | int | float)}
    rows = [[escape(name), " ".join(map(code, dict.fromkeys(values))) or code(None)] for name, values in facts.items()]
    body = table(("identity", "sha256 or version"), rows)
    keys_of_start = ("phase", "attempt", "step", "world_size", "started_from", "torch", "code_version")
    starts = [[*(code(a.get(key)) for key in keys_of_start), utc(a.get("time"))] for a in run.attempts]
    if starts:
        body += table(("phase", "attempt", "at step", "ranks", "from", "torch", "code", "time (UTC)"), starts)
    settings = []
    for path in SETTINGS:
        section, key = path.split(".")
        values = [config.get(section, {}).get(key) for config in run.configs.values()]
        if any(value is not None for value in values):
            settings.append([escape(path), *(code(value) for value in values)])
    if settings:
        body += table(("setting", *run.configs), settings)
    return card("Provenance", body)


def write_page(folders: Iterable[Path], out: Path, now: float | None = None) -> list[Run]:
    """Write the page of these run folders to `out`, whole or not at all; returns what was read."""
    runs = [read_run(folder) for folder in folders]
    text = page(runs, now=time.time() if now is None else now)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, text)
    return runs


def main(run_dirs: Annotated[tuple[Path, ...], tyro.conf.Positional], out: Path = Path("dashboard.html")) -> None:
    """Draw one or several run folders as one HTML file that needs no network.

    Args:
        run_dirs: run folders; several are compared
        out: the HTML file to write
    """
    if not run_dirs:
        raise ValueError("no run folder given; for example: python -m tools.dashboard runs/demo --out dashboard.html")
    runs = write_page(run_dirs, out)
    for run in runs:
        print(f"{run.name}: {len(run.kept_rows)} logged steps, {len(run.evals)} evaluations")
        for warning in run.warnings:
            print(f"  {warning}")
    print(f"{out} ({out.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except ValueError as error:
        raise SystemExit(f"dashboard: {error}") from None
