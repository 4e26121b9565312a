"""Panels lay themselves out from their heights."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from records.run import read_run
from tests.tools.dashboard import made_up_run
from tools.dashboard import panels as module
from tools.dashboard.panels import MACHINE, TITLE_PX, TRAINING, Panel, machine_figure
from tools.dashboard.rows import prepare


@pytest.mark.parametrize(
    "panels", [TRAINING, MACHINE, (*MACHINE, Panel("A new one", "s", ("seconds",), 120))]
)
def test_panels_fill_the_height_without_overlaps(
    panels: tuple[Panel, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MACHINE", panels)
    run = read_run(made_up_run.write_run(tmp_path / "small", steps=60, every=1))
    prepare(run)
    figure = machine_figure(run)
    axes = [figure.layout[f"yaxis{i or ''}"] for i in range(1, len(panels) + 1)]
    plot_px = figure.layout.height - figure.layout.margin.t - figure.layout.margin.b
    for panel, axis in zip(panels, axes, strict=True):
        assert (axis.domain[1] - axis.domain[0]) * plot_px == pytest.approx(panel.px)
    for upper, lower in pairwise(axes):
        assert (upper.domain[0] - lower.domain[1]) * plot_px == pytest.approx(TITLE_PX)
    assert axes[-1].domain[0] == pytest.approx(0)


def test_a_panel_without_figures_takes_no_room(tmp_path: Path) -> None:
    run = read_run(made_up_run.write_run(tmp_path / "small", steps=60, every=1))
    prepare(run)
    whole = machine_figure(run)
    for row in run.kept_rows:
        row["mfu"] = None
    figure, mfu = machine_figure(run), next(panel for panel in MACHINE if panel.title == "MFU")
    assert whole.layout.height - figure.layout.height == mfu.px + TITLE_PX
    assert not any("MFU" in note.text for note in figure.layout.annotations)
