"""Several runs beside each other: their losses, what was measured, and the settings that differ."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from records.page import card, chart, code, fold, measured, none, percent, short, table
from records.run import Record, Run
from tools.dashboard.cards import flat, recent
from tools.dashboard.core import core_of_all
from tools.dashboard.figures import comparison_figure
from tools.dashboard.scores import code_series, interval_text


def comparison(runs: Sequence[Run]) -> str:
    caption = "Smoothed. Diamonds: validation loss. A ring: the run began at another run's checkpoint."
    figure = card("Loss of all runs", chart(comparison_figure(runs), "comparison"), caption)
    return figure + side_by_side(runs) + core_of_all(runs)


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
