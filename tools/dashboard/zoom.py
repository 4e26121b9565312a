"""The rows of a zoomed range, which a served page asks for: the curves of a chart as if the range were the run.

Of more rows than are drawn, panels show the median of each group of neighbours and the band from its lowest to its
highest value, in which a spike of one row stays.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import replace

import plotly.graph_objects as go

from records.files import JsonObject
from records.run import Run
from tools.dashboard import figures, panels
from tools.dashboard.rows import SHORT, middles

BUCKETS = 1000  # at most so many groups of rows are drawn; of fewer rows all
CHARTS: dict[
    str, tuple[Callable[[Run], go.Figure], tuple[panels.Panel, ...]]
] = {  # by the beginning of their names
    "training": (panels.training_figure, panels.TRAINING),
    "machine": (panels.machine_figure, panels.MACHINE),
    "sources": (figures.sources_figure, ()),
}


def traces_in(run: Run, chart: str, axis: str, low: float, high: float) -> list[JsonObject] | None:
    """The traces of a chart of rows between two places on an axis, and of the rows next to them.

    run: prepared, with all its rows. chart: a key of CHARTS. None where the range has no rows, or lacks the figures
    of a whole panel. Raises ValueError for an unknown axis.
    """
    if axis not in figures.AXES:
        raise ValueError(f"no axis {axis}; there are {', '.join(figures.AXES)}")
    draw, drawn = CHARTS[chart]
    key, segments = figures.AXES[axis][0], []
    for segment in run.segments:
        places = [row[key] or 0.0 for row in segment.rows]
        begin, end = bisect.bisect_left(places, low), bisect.bisect_right(places, high)
        if begin < end:
            segments.append(replace(segment, rows=segment.rows[max(0, begin - 1) : end + 1]))
    count = sum(len(segment.rows) for segment in segments if segment.kept)
    width = 1 << max(0, math.ceil(math.log2(max(count, 1) / BUCKETS)))
    half_life = SHORT if width == 1 else max(2 * width, 2 * SHORT)
    if drawn and width > 1:
        keys = [panel.keys[0] for panel in drawn if panel.extremes]
        segments = [replace(segment, rows=middles(segment.rows, width, keys)) for segment in segments]
        half_life = SHORT  # all of these
    part = replace(run, segments=segments, half_life=half_life)
    if not count or panels.not_measured(part, drawn) != panels.not_measured(run, drawn):
        return None
    return draw(part).to_plotly_json()["data"]
