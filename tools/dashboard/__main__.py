"""One self-contained HTML page of one or more runs: what was trained, its progress, and what was measured.

    python -m tools.dashboard runs/demo --out runs/demo/dashboard.html    (once)
    python -m tools.dashboard runs/phase1 runs/phase2 --watch             (rewritten whenever the runs change)
    python -m tools.dashboard runs/phase1 --serve --port 8765             (served locally, charts updated in place)

The page is one file with plotly.js inside; its policy makes the browser refuse the network. What has no figure says
"not measured". records.run reads a run, figures.py, panels.py and core.py draw, cards.py and scores.py write the cards.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Annotated

import tyro
from plotly.offline import get_plotlyjs

from records.files import write_atomically
from records.page import card, chart, html_page, line_chip, utc
from records.run import Run, read_run
from tools.dashboard.cards import header, measurements, provenance_card, tiles_of, training_cards
from tools.dashboard.core import core_of_all
from tools.dashboard.figures import comparison_figure, smooth_losses
from tools.dashboard.live import Live, serve, watch
from tools.dashboard.scores import evaluations_card, score_cards


def page_body(runs: Sequence[Run], now: float) -> str:
    """The inner HTML of <main>: a comparison when there are several runs, a section for each run."""
    for run in runs:
        smooth_losses(run)
    sections = [comparison(runs) if len(runs) > 1 else "", *(run_section(run, now) for run in runs)]
    return f"{''.join(sections)}<footer>Drawn {utc(now)} UTC from the files of the run.</footer>"


def comparison(runs: Sequence[Run]) -> str:
    chips = "".join(line_chip(i, run.name) for i, run in enumerate(runs))
    body = f'<p class="chips">{chips}</p>{chart(comparison_figure(runs), "comparison")}'
    caption = "Smoothed. Diamonds: validation loss. A ring: the run began at another run's checkpoint."
    return card("Loss of all runs", body, caption) + core_of_all(runs)


def run_section(run: Run, now: float) -> str:
    head, cards = header(run, now), (training_cards, score_cards, measurements, evaluations_card, provenance_card)
    warnings = "".join(f"<li>{escape(warning)}</li>" for warning in run.warnings)
    told = f'<ul class="warnings">{warnings}</ul>' if warnings else ""
    return f"<article>{head}{told}{tiles_of(run)}{''.join(write(run) for write in cards)}</article>"


def page(runs: Sequence[Run], now: float, reload_s: float | None = None) -> str:
    """The whole page as text; with reload_s the browser reloads it at this interval."""
    live = f"setTimeout(() => location.reload(), {1000 * reload_s:.0f});" if reload_s else ""
    return html_page(" · ".join(run.name for run in runs), page_body(runs, now), get_plotlyjs(), live)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """All runs, with names that tell them apart: charts are named after their run."""
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    for index, (run, folder) in enumerate(zip(runs, folders, strict=True)):
        if names.count(run.name) > 1:
            run.name = "/".join(folder.resolve().parts[-2:])
        if run.name in (other.name for other in runs[:index]):
            run.name += f" ({index + 1})"
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
    """Serve the page of these run folders on this machine until interrupted; it polls for changes every `every_s`."""
    title = " · ".join(run.name for run in read_runs(folders))

    def whole(body: str, version: str) -> str:
        return html_page(title, body, get_plotlyjs(), f"poll({1000 * every_s:.0f});", version, connect="'self'")

    live = Live(folders, lambda: page_body(read_runs(folders), time.time()), whole)
    serve(live, port, lambda address: print(f"{address}  (Ctrl-C to stop)", flush=True))


def main(
    run_dirs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    out: Path = Path("dashboard.html"),
    watch_runs: Annotated[bool, tyro.conf.arg(name="watch")] = False,
    serve_runs: Annotated[bool, tyro.conf.arg(name="serve")] = False,
    port: int = 8765,
    every_s: float = 5.0,
) -> None:
    """Draw one or more run folders as one HTML file that needs no network, once or while they run.

    Args:
        run_dirs: run folders; several are compared
        out: HTML file to write
        watch_runs: rewrite the file whenever the runs change, until Ctrl-C; the page reloads itself meanwhile
        serve_runs: serve the page on 127.0.0.1 instead of writing a file; its charts are updated in place
        port: port to serve on; 0 takes a free one
        every_s: seconds between two checks for changes of the runs
    """
    if not run_dirs:
        raise ValueError("no run folder given; for example: python -m tools.dashboard runs/demo --out dashboard.html")
    if every_s <= 0:
        raise ValueError(f"--every-s {every_s} is not a positive number of seconds; give a value above 0, such as 5")
    try:
        if serve_runs:
            serve_pages(run_dirs, port, every_s)
        if watch_runs:
            print(f"keeping {out} up to date  (Ctrl-C to stop)", flush=True)
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
