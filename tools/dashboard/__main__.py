"""Draw one self-contained HTML page of one or more runs: training, progress, evaluations.

    python -m tools.dashboard runs/demo --out runs/demo/dashboard.html

The page holds plotly.js, and its policy makes the browser refuse the network. What has no figure
takes no room. W&B and TensorBoard are the live view.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import tyro

from records.command import run_function
from records.files import write_atomically
from records.run import Run, read_run
from tools.dashboard import evaluations, training
from tools.dashboard.header import header, write_tiles
from tools.dashboard.page import utc, write_html

# in the order of the page, by their names in the jump links
CARDS: dict[str, Callable[[Run], str]] = {
    "CORE": evaluations.write_core_card,
    "Training": training.write_training_card,
    "Sources": training.write_sources_card,
    "Positions": training.write_positions_card,
    "Bits": evaluations.write_bits_card,
    "Tasks": evaluations.write_tasks_card,
    "Scores": evaluations.write_scores_card,
    "Machine": training.write_machine_card,
    "Incidents": training.write_incidents_card,
    "Contamination": evaluations.write_contamination_card,
}


def draw(run: Run, name: str, write: Callable[[Run], str]) -> str | None:
    """Write one part of a run's page; where it fails, None and a problem of the run."""
    try:
        return write(run)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        # one record of a shape that nobody foresaw must not cost the whole page
        run.problems.append(f"the {name} cannot be drawn: {type(error).__name__}: {error}")
        return None


def run_section(run: Run, index: int, now: float) -> str:
    """Write the header of a run, and its cards that have something to show."""
    title = draw(run, "header", lambda run: header(run, now)) or f"<h1>{escape(run.name)}</h1>"
    head, body, links, absent = title + (draw(run, "tiles", write_tiles) or ""), "", "", []
    for name, write in CARDS.items():
        html = draw(run, f"card {name}", write)
        # "" is a card without figures, None one that cannot be drawn, of which a warning tells
        if html:
            place = f"run{index}-{name.lower()}"
            links += f'<a href="#{place}">{name}</a>'
            body += f'<div class="part" id="{place}">{html}</div>'
        elif html is not None:
            absent.append(name)
    warnings = "".join(f"<li>{escape(warning)}</li>" for warning in run.warnings)
    head += f'<ul class="warnings">{warnings}</ul>' if warnings else ""
    rest = f'<p class="caption">Not measured: {", ".join(absent)}.</p>' if absent else ""
    return f'<article>{head}<nav class="jump">{links}</nav>{body}{rest}</article>'


def page(runs: Sequence[Run], now: float) -> str:
    title = " · ".join(run.name for run in runs)
    sections = [run_section(run, index, now) for index, run in enumerate(runs)]
    together = training.write_overlay_card(runs) if len(runs) > 1 else ""
    body = f"{together}{''.join(sections)}<footer>Drawn {utc(now)} UTC from the files of the run.</footer>"
    library = files("plotly").joinpath("package_data/plotly.min.js").read_text(encoding="utf-8")
    return write_html(title, body, library)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read all runs, under distinct names."""
    # charts are named after their run
    runs = [read_run(folder) for folder in folders]
    for index, run in enumerate(runs):
        if run.name in (other.name for other in runs[:index]):
            run.name += f" ({index + 1})"
    return runs


def write_page(folders: Sequence[Path], out: Path, now: float) -> list[Run]:
    """Write the page of run folders to `out`; return what was read."""
    runs = read_runs(folders)
    write_atomically(out, page(runs, now))
    return runs


def main(
    run_dirs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    out: Path = Path("dashboard.html"),
) -> None:
    """Draw one or more run folders as one HTML file that needs no network.

    Args:
        run_dirs: run folders; the losses of several are drawn over each other
        out: HTML file to write
    """
    if not run_dirs:
        raise ValueError(
            "no run folder given; for example: python -m tools.dashboard runs/demo --out dashboard.html"
        )
    for run in write_page(run_dirs, out, time.time()):
        steps = training.count(len(run.rows), "logged step")
        print(f"{run.name}: {steps}, {len(run.evals)} evaluations", *run.warnings, sep="\n  ")
    print(f"{out} ({out.stat().st_size / 1e6:.1f} MB)", flush=True)


if __name__ == "__main__":
    run_function("tools.dashboard", main)
