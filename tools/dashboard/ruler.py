"""RULER on the page: scores by task and length beside the published, and how deep a needle may lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

import plotly.graph_objects as go

from evals.intervals import wilson
from evals.lm_eval.tasks import RULER_TASKS
from records.page import PLOT, chart, code, missing, none, percent, table
from records.run import Record, Run, number
from tools.dashboard.core import Point, how_asked, interval_text, points_of, where_evaluated
from tools.dashboard.figures import Series, add_choice
from tools.dashboard.references import RULER, RULER_LENGTHS

FOUND = [[0, "rgba(229,100,124,0.75)"], [0.5, "rgba(201,162,39,0.35)"], [1, "rgba(47,181,160,0.6)"]]
Parts = Sequence[tuple[int, int]]  # of the depth: needles found and asked for, the beginning first


def ruler_series(run: Run) -> list[Series]:
    """The mean of RULER's tasks by length, of the checkpoints that have them all, asked as the newest one."""
    series = []
    for length, entries in sorted(
        ruler_scores(points_of(run, "lm_eval")).items(), key=lambda item: int(item[0])
    ):
        whole = [e for e in entries if e.how == entries[-1].how and len(e.scores) == len(RULER_TASKS)]
        points = [(e.point, fmean(e.scores.values())) for e in whole]
        if whole:
            published = fmean(RULER[length].values()) if whole[-1].conversation and length in RULER else None
            series.append(
                Series(f"{int(length):,} tokens", points, published, [e.mean_ends() for e in whole])
            )
    return series


def ruler_table(run: Run) -> str:
    """RULER: eleven tasks by length, ours beside the published; a length's mean only when
    all tasks are there.
    """
    newest_of = {length: entries[-1] for length, entries in ruler_scores(points_of(run, "lm_eval")).items()}
    if not newest_of:
        return ""
    lengths = sorted({*newest_of, *RULER_LENGTHS}, key=int)
    columns: list[tuple[str, Mapping[str, float], str]] = []  # title, scores, what a gap reads
    for length in lengths:
        entry = newest_of.get(length)
        columns += [
            (
                f"{int(length):,} tokens",
                entry.scores if entry else {},
                missing("missing") if entry else none(),
            )
        ]
        same = length in RULER and (entry is None or entry.conversation)
        columns += [("published", RULER[length], "")] if same else []
    asked = {f"{int(length):,} tokens": entry for length, entry in newest_of.items()}

    def cell(task: str, title: str, scores: Mapping[str, float], gap: str) -> str:
        ends = asked[title].ends(task) if title in asked and task in scores else ()
        return percent(scores[task]) + interval_text(ends) if task in scores else gap

    rows = [[escape(task), *(cell(task, *column) for column in columns)] for task in RULER_TASKS]
    means = [f"<b>{percent(fmean(scores.values()))}</b>" if len(scores) == len(RULER_TASKS) else
             '<b class="missing">N/A</b>' if scores else "" for _, scores, _ in columns]  # fmt: skip
    rows.append([f"<b>mean of {len(RULER_TASKS)}</b>", *means])
    caption = "; ".join(f"{int(length):,} tokens: {entry.source}" for length, entry in newest_of.items())
    text = table(("task", *(title for title, *_ in columns)), rows, "numbers")
    depths = {length: newest_of[length].depths for length in lengths if length in newest_of}
    return f'<h3>RULER by task</h3>{text}<p class="caption">{caption}.</p>{depth_part(depths, run.name)}'


def depth_part(depths: Mapping[str, Mapping[str, Parts]], name: str) -> str:
    """The share of needles found by length of the prompt and depth in it, of all needle tasks or one of them."""
    tasks = list(dict.fromkeys(task for of in depths.values() for task in of))
    if not tasks:
        return ""
    maps = {
        "all": depth_map(depths, tasks),
        **{task.removeprefix("niah_"): depth_map(depths, [task]) for task in tasks},
    }
    rows = len(maps["all"]["z"])
    ends = [100 * i // rows for i in range(rows + 1)]
    figure = go.Figure(layout={**PLOT, "height": 110 + 24 * rows, "hovermode": "closest"})
    figure.add_heatmap(
        **maps["all"], x=[f"{int(length):,}" for length in depths], meta={"task": maps}, colorscale=FOUND, zmin=0,
        y=[f"{a} – {b} %" for a, b in pairwise(ends)], zmax=1, showscale=False, xgap=2, ygap=2,
        texttemplate="%{text}", hoverongaps=False,
        hovertemplate="%{x} tokens, depth %{y}<br>found %{text}: %{z:.1%}<extra></extra>",
    )  # fmt: skip
    still = {
        "fixedrange": True,
        "showgrid": False,
        "zeroline": False,
        "type": "category",
        "title_font_size": 12,
    }
    figure.update_xaxes(title_text="tokens of the prompt", **still)
    figure.update_yaxes(autorange="reversed", **still).update_layout(margin_l=84)
    add_choice(figure, "task", {task: {} for task in maps})
    words = "Needles found of those asked for, by their place in the prompt, 0 % at its beginning."
    drawn = chart(figure, f"depths-{name}")
    return f'<h3>Needles by length and depth</h3>{drawn}<p class="caption">{words}</p>'


def depth_map(depths: Mapping[str, Mapping[str, Parts]], tasks: Sequence[str]) -> dict[str, list[list[Any]]]:
    """z, shares, and text, counts, of a row a part of the depth and a column a length; None and "" where none was."""
    columns = []
    for of in depths.values():
        parts = zip(*(of[task] for task in tasks if task in of), strict=True)
        columns.append([tuple(map(sum, zip(*part, strict=True))) for part in parts])
    rows = range(max(map(len, columns)))
    cells = [[column[i] if column else (0, 0) for column in columns] for i in rows]
    return {
        "z": [[found / asked if asked else None for found, asked in row] for row in cells],
        "text": [[f"{found}/{asked}" if asked else "" for found, asked in row] for row in cells],
    }


class RulerEntry(NamedTuple):
    """RULER of one checkpoint at one length, asked in one way."""

    point: Point
    how: str  # HTML
    scores: dict[str, float]  # task -> share
    documents: dict[str, float]
    depths: dict[str, Parts]

    def ends(self, task: str) -> Sequence[float]:
        """Wilson's interval of a task's score, its documents as sample; () where their number is not known."""
        if not (asked := number(self.documents.get(task))):
            return ()
        middle, half = wilson(self.scores[task] * asked, round(asked))
        return middle - half, middle + half

    def mean_ends(self) -> Sequence[float]:
        """The interval of the mean of the tasks, from theirs."""
        ends = [self.ends(task) for task in self.scores]
        half = sum((end[1] - end[0]) ** 2 for end in ends if end) ** 0.5 / 2 / len(ends)
        mean = fmean(self.scores.values())
        return (mean - half, mean + half) if all(ends) else ()

    @property
    def conversation(self) -> bool:
        """Whether the prompts were messages, as those of the published model."""
        return bool(self.point["chat_template"])

    @property
    def source(self) -> str:
        return f"{escape(where_evaluated(self.point))}, {self.how}"


def ruler_scores(points: Sequence[Point]) -> dict[str, list[RulerEntry]]:
    """Length -> what was scored, in the order of the run.

    Scores of different checkpoints, haystacks or tokenizers (which cut the documents) are never together.
    """
    found: dict[str, list[RulerEntry]] = {}
    for point in points:
        how = f"{escape(str(point['haystack']))} haystack, tokenizer {code(point['tokenizer_sha256'])}"
        how += escape(how_asked(point))
        for length, tasks in (point["ruler"] or {}).items():
            if not str(length).isdigit():
                continue
            entries, entry = found.setdefault(length, []), RulerEntry(point, how, {}, {}, {})
            if not entries or entries[-1].source != entry.source:
                entries.append(entry)
            known = {task: v for task, value in tasks.items() if (v := number(value)) is not None and v >= 0}
            entries[-1].scores.update(known)
            counts = (point["ruler_counts"] or Record())[length] or Record()
            entries[-1].documents.update(counts["documents"] or {})
            entries[-1].depths.update(counts["depths"] or {})
    return {length: kept for length, entries in found.items() if (kept := [e for e in entries if e.scores])}
