"""Several runs beside each other: their losses, what was measured, and the settings that differ."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from html import escape
from pathlib import Path

from evals.compare import Change, changes, compare_named
from evals.intervals import Z95
from records.page import card, chart, code, fold, measured, none, percent, short, table
from records.run import Record, Run
from tools.dashboard.cards import flat, recent
from tools.dashboard.core import core_of_all, interval_text
from tools.dashboard.figures import comparison_figure
from tools.dashboard.scores import code_series

KINDS = {
    "core": "CORE",
    "gold": "gold bits in the training loop",
    "lm_eval": "lm-eval's tasks",
    "code": "code",
}


def comparison(runs: Sequence[Run]) -> str:
    caption = "Smoothed. Diamonds: validation loss. A ring: the run began at another run's checkpoint."
    figure = card("Loss of all runs", chart(comparison_figure(runs), "comparison"), caption)
    return figure + side_by_side(runs) + paired_card(runs) + core_of_all(runs)


def side_by_side(runs: Sequence[Run]) -> str:
    """The newest figures of each run, and the settings in which any two differ."""
    columns = [figures_of(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[escape(name), *(column.get(name, none()) for column in columns)] for name in names]
    head = ("the newest", *(run.name for run in runs))
    settings = [
        {f"{phase} {key}": value for phase, config in run.configs.items() for key, value in flat(config)}
        for run in runs
    ]
    every = dict.fromkeys(name for of in settings for name in of)
    differ = [name for name in every if any(of.get(name) != settings[0].get(name) for of in settings)]
    cells = [[escape(name), *(code(of.get(name)) for of in settings)] for name in sorted(differ)]
    told = fold(f"{len(cells)} settings differ", table(("setting", *head[1:]), cells, "wrap"), opened=True)
    same = "<p class='caption'>All settings on record are equal.</p>"
    return card("Runs side by side", table(head, rows, "numbers wrap") + (told if cells else same))


def paired_card(runs: Sequence[Run]) -> str:
    """The differences of all runs from the first one, of the same items; "" where no two runs kept their answers."""
    parts = []
    for run in runs[1:]:
        for kind, title in KINDS.items():
            counts = [sum(bool(each["items"]) for each in of.evals_of(kind)) for of in (runs[0], run)]
            if all(counts):
                told = differences(runs[0].folder, run.folder, kind, *counts)
                parts.append(f"<h3>{escape(run.name)} minus {escape(runs[0].name)}: {title}</h3>{told}")
    caption = (
        "The newest checkpoints, on the same items. ±: 95 %, in which what is hard for both cancels; bold: beyond "
        "chance. Scores rise, bits per byte of the right answers fall."
    )
    return card("Differences with paired errors", "".join(parts), caption) if parts else ""


@lru_cache(64)
def differences(a: Path, b: Path, kind: str, *counts: int) -> str:
    """`evals.compare` of two runs as tables, CORE, its categories and means before the tasks; or why they cannot be
    compared. counts: of the evaluations, which make the result new.
    """
    try:
        found = compare_named(str(a), str(b), kind)
    except ValueError as problem:
        return f"<p>{none(f'not compared: {problem}')}</p>"
    rows = {name: [escape(name), *map(interval, both)] for name, both in changes(found).items() if any(both)}
    tasks = [rows.pop(name) for name in found["tasks"] if name in rows]
    head = ("", "score", "gold bits per byte")
    whole = table(head, list(rows.values())[::-1], "numbers") if rows else ""
    return whole + (
        fold(f"{len(tasks)} tasks", table(head, tasks, "numbers"), opened=not rows) if tasks else ""
    )


def interval(change: Change) -> str:
    if change is None:
        return ""
    value, half = change[0], Z95 * change[1]
    text = f"{value:+.4f} ± {half:.4f}"
    return f"<b>{text}</b>" if abs(value) > half else text


def figures_of(run: Run) -> dict[str, str]:
    """The newest loss, bits per byte, code and speeds, by name; as HTML."""
    bits, decode = ([Record(), *run.evals_of(kind)][-1] for kind in ("bits_per_byte", "decode_speed"))
    losses = [row["smooth_loss"] for row in run.kept_rows if row["smooth_loss"] is not None]
    return {
        "loss, smoothed": measured(losses[-1] if losses else None, ".4f"),
        "bits per byte": measured(bits["bits_per_byte"], ".4f"),
        **{
            f"{each.name} pass@1": percent(each.points[-1][1]) + interval_text(each.ends[-1])
            for each in code_series(run)
        },
        "training, tokens per second": short(recent(run, "tokens_per_s")),
        "decode, tokens per second": short(decode["tokens_per_s"]),
    }
