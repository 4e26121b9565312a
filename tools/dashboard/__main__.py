"""One self-contained HTML page of one or many runs: what was trained, how it goes, what was measured.

    python -m tools.dashboard runs/demo --out runs/demo/dashboard.html    (once)
    python -m tools.dashboard runs/phase1 runs/phase2 --watch             (the file again and again while they run)
    python -m tools.dashboard runs/phase1 --serve --port 8765             (served here, charts updated in place)

The page is one file without any outside host: plotly.js stands in it, and its own policy lets the browser refuse the
network. What has no figure says "not measured". dashboard_run.py reads, dashboard_charts.py, dashboard_overlays.py and
dashboard_core.py draw, dashboard_cards.py and dashboard_scores.py write the rest, dashboard_live.py watches and serves.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Annotated

import tyro
from plotly.offline import get_plotlyjs

from laneformer import LaneformerConfig
from records.evals import PROVENANCE
from records.files import write_atomically
from records.run import Run, number, read_run
from tools.dashboard.cards import (
    bits_card,
    card,
    chip,
    code,
    decode_card,
    line_chip,
    measured,
    short,
    sources_card,
    table,
    utc,
    where_evaluated,
)
from tools.dashboard.charts import (
    BUCKETS,
    VALID,
    attempts_of,
    colour,
    half_life_rows,
    machine_figure,
    restarts,
    smooth_losses,
    to_div,
    training_figure,
)
from tools.dashboard.live import Live, serve, watch
from tools.dashboard.overlays import comparison_figure
from tools.dashboard.scores import score_cards, scores_of_all
from tools.dashboard.style import SCRIPT, STYLE

LISTED = 40  # more evaluations than this are counted, not listed
CHIPS = 24  # more attempts than this are counted, not listed
# of an evaluation: what is said first, and how it was made
PREFERRED = ("core_v1", "core_v2", "pass@1_plus", "bits_per_byte", "loss", "tokens_per_s", "percent_of_probe")
HOW = {"dataset": "", "protocol": "", "seed": "seed ", "max_per_task": "at most ", "num_fewshot": "shots ",
       "limit": "limit ", "haystack": "haystack ", "not_core": ""}  # fmt: skip
# what of the job's config is worth a line
SETTINGS = (
    "model.flavor", "training.steps", "training.global_batch_size", "training.local_batch_size", "training.seq_len",
    "training.max_norm", "training.mixed_precision_param", "optimizer.name", "optimizer.lr", "optimizer.beta1",
    "optimizer.beta2", "optimizer.eps", "optimizer.weight_decay", "lr_scheduler.warmup_steps",
    "lr_scheduler.decay_ratio", "lr_scheduler.decay_type", "lr_scheduler.min_lr_factor", "mixture.lock",
    "parallelism.data_parallel_shard_degree", "parallelism.data_parallel_replicate_degree", "compile.enable",
    "checkpoint.interval", "checkpoint.initial_load_path",
)  # fmt: skip


def page(runs: Sequence[Run], now: float, reload_s: float | None = None) -> str:
    """The whole page as text; with reload_s the browser loads the file again every so many seconds."""
    live = f"setTimeout(() => location.reload(), {1000 * reload_s:.0f});" if reload_s else ""
    return whole_page(page_body(runs, now), " · ".join(run.name for run in runs), live)


def whole_page(body: str, title: str, live: str = "", version: str = "", connect: str = "'none'") -> str:
    """Head, style and scripts around the inner HTML of <main>; `live` is script that keeps the page up to date.

    The policy in the head lets the browser itself refuse any outside host.
    """
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
    policy += f"; connect-src {connect}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}"><link rel="icon" href="data:,">
<style>{STYLE}</style><script>{get_plotlyjs()}</script></head>
<body data-version="{version}"><main>{body}</main><script>{SCRIPT}{live}</script></body></html>
"""


def page_body(runs: Sequence[Run], now: float) -> str:
    """The inner HTML of <main>: a comparison when there are several runs, a section for each run."""
    for run in runs:
        smooth_losses(run)
    sections = [run_section(run, index, now) for index, run in enumerate(runs)]
    if len(runs) > 1:
        chips = "".join(line_chip(i, run.name) for i, run in enumerate(runs))
        figure = to_div(comparison_figure(runs), "comparison", "middle")
        caption = "Smoothed, over tokens. Diamonds: validation loss. A ring: the run began at another run's checkpoint."
        losses = card("Loss of all runs", f'<p class="chips">{chips}</p>{figure}', caption)
        sections.insert(0, losses + scores_of_all(runs))
    return f"{''.join(sections)}<footer>Drawn {utc(now)} UTC from the files of the run.</footer>"


def run_section(run: Run, index: int, now: float) -> str:
    warnings = "".join(f"<li>{escape(warning)}</li>" for warning in run.warnings)
    told = f'<ul class="warnings">{warnings}</ul>' if warnings else ""
    layout = "stack" if len(run.evals_of("bits_per_byte")) > 1 else "pair"  # curves over checkpoints need the width
    measurements = f'<div class="{layout}">{bits_card(run)}{decode_card(run)}</div>'
    parts = (header(run, now), told, tiles(run), charts_of(run, index), score_cards(run, index), measurements,
             evaluations_card(run))  # fmt: skip
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
    attempts = attempts_of(run)
    chips = [
        chip(colour(i), f"{phase} · attempt {n}" if len(run.phases) > 1 else f"attempt {n}")
        for i, (phase, n) in enumerate(attempts)
    ]
    chips[CHIPS:] = [f"and {len(chips) - CHIPS} more attempts"] * (len(chips) > CHIPS)
    if any(row["valid_loss"] is not None for row in run.kept_rows):
        chips.append(chip(VALID, "validation loss"))
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
    if run.events:
        caption += " ▾ above the loss: what happened to the job; point at it."
    chips_line = f'<p class="chips">{"".join(chips)}</p>'
    training = chips_line + to_div(training_figure(run), f"training-{index}", "tall")
    machine = to_div(machine_figure(run), f"machine-{index}", "many")
    of_machine = "Checkpoint seconds stand in the first row after the save. Waiting and memory are rank 0's."
    return "".join(
        (
            card("Training", training, caption + " Drag to zoom, double-click for everything."),
            sources_card(run, index),
            card("Statistics and machine", machine, of_machine),
        )
    )


def evaluations_card(run: Run) -> str:
    """The evaluations on record, the newest first."""
    rows = []
    for record in run.evals[: -LISTED - 1 : -1]:
        figures = {k: number(v) for k, v in record.items() if k not in (*PROVENANCE, *HOW, "checkpoint_time")}
        known = [(k, v) for k, v in figures.items() if v is not None]
        known.sort(key=lambda item: PREFERRED.index(item[0]) if item[0] in PREFERRED else len(PREFERRED))
        nothing = "N/A" if record.get("missing") else "see its table"
        result = ", ".join(f"{k} {v:.4g}" for k, v in known[:2]) or nothing
        how = ", ".join(f"{word}{record[key]}" for key, word in HOW.items() if record.get(key) is not None)
        cells = [record.get("kind", "?"), where_evaluated(record), result, how]
        rest = [short(record.get("tokens_total")), measured(record.get("seconds"), ".1f", " s")]
        rest += [utc(record.get("time")), code(record.get("code_version"))]
        rows.append([*(escape(str(c)) for c in cells), *rest])
    head = ("evaluation", "checkpoint", "result", "how", "tokens", "took", "time (UTC)", "code")
    more = len(run.evals) - len(rows)
    caption = f"And {more:,} older ones, all in evals.jsonl." if more else ""
    return card("Evaluations", table(head, rows) if rows else '<p class="none">not measured</p>', caption)


def provenance_card(run: Run) -> str:
    """Where the figures come from: data, tokenizer and code by hash, the starts of the job, its settings by phase."""
    keys = {"tokenizer_sha256": "tokenizer", "data_sha256": "evaluation data", "code_version": "evaluation code"}
    facts = {title: [e[key] for e in run.evals if e.get(key)] for key, title in keys.items()}
    facts["mixture"] = [a["mixture_fingerprint"] for a in run.attempts if a.get("mixture_fingerprint")]
    for phase, lineage in run.lineages.items():
        known = {key: value for key, value in lineage.items() if isinstance(value, str | int | float)}
        facts |= {f"{key} of {phase}": [value] for key, value in known.items()}
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


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """All runs, with names that tell them apart."""
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    for run, folder in zip(runs, folders, strict=True):
        if names.count(run.name) > 1:
            run.name = "/".join(folder.resolve().parts[-2:])
    return runs


def write_page(
    folders: Iterable[Path], out: Path, now: float | None = None, reload_s: float | None = None
) -> list[Run]:
    """Write the page of these run folders to `out`, whole or not at all; returns what was read."""
    runs = read_runs(list(folders))
    text = page(runs, time.time() if now is None else now, reload_s)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, text)
    return runs


def serve_pages(folders: Sequence[Path], port: int, every_s: float) -> None:
    """Serve the page of these run folders on this machine until interrupted; it asks for changes every so often."""
    title = " · ".join(run.name for run in read_runs(folders))

    def whole(body: str, version: str) -> str:
        return whole_page(body, title, f"poll({1000 * every_s:.0f});", version, connect="'self'")

    live = Live(folders, lambda: page_body(read_runs(folders), time.time()), whole)
    serve(live, port, lambda address: print(f"{address}  (Ctrl-C ends it)", flush=True))


def main(
    run_dirs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    out: Path = Path("dashboard.html"),
    watch_runs: Annotated[bool, tyro.conf.arg(name="watch")] = False,
    serve_runs: Annotated[bool, tyro.conf.arg(name="serve")] = False,
    port: int = 8765,
    every_s: float = 5.0,
) -> None:
    """Draw one or several run folders as one HTML file that needs no network, once or while they run.

    Args:
        run_dirs: run folders; several are compared
        out: the HTML file to write
        watch_runs: write the file again whenever the runs change, until Ctrl-C; the page reloads itself meanwhile
        serve_runs: serve the page on 127.0.0.1 instead of writing a file; its charts are updated in place
        port: where to serve; 0 takes a free one
        every_s: seconds between two looks at the runs
    """
    if not run_dirs:
        raise ValueError("no run folder given; for example: python -m tools.dashboard runs/demo --out dashboard.html")
    if every_s <= 0:
        raise ValueError(f"--every-s {every_s} is not a time between two looks; give seconds above 0")
    try:
        if serve_runs:
            serve_pages(run_dirs, port, every_s)
        if watch_runs:
            print(f"{out} is kept up to date  (Ctrl-C ends it)", flush=True)
            watch(run_dirs, lambda: write_page(run_dirs, out, reload_s=max(every_s, 1.0)), every_s)
    except KeyboardInterrupt:
        if serve_runs:
            return
    for run in write_page(run_dirs, out):
        print(f"{run.name}: {len(run.kept_rows)} logged steps, {len(run.evals)} evaluations")
        for warning in run.warnings:
            print(f"  {warning}")
    print(f"{out} ({out.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except ValueError as error:
        raise SystemExit(f"dashboard: {error}") from None
