"""The dashboard's figures: sampling, smoothing, and panels that lay themselves out."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from records.run import read_run
from tests.tools.dashboard import made_up_run
from tools.dashboard import figures
from tools.dashboard.figures import (
    BUCKETS,
    MACHINE,
    TITLE_PX,
    TRAINING,
    Panel,
    machine_figure,
    sample,
    smooth,
    smooth_losses,
)


def test_sampling_keeps_spikes_and_ends_and_is_bounded() -> None:
    rows = [{"loss": 2.0, "grad_norm": 0.3, "tokens_per_s": 100.0} for _ in range(50_000)]
    rows[31_337]["loss"], rows[4242]["grad_norm"], rows[777]["tokens_per_s"] = 9.0, 50.0, 1.0
    chosen = sample(rows, BUCKETS)
    assert {0, 31_337, 4242, 777, 49_999} <= set(chosen)
    assert len(chosen) <= 5 * BUCKETS + 1


def test_smoothing_of_a_constant_is_the_constant_and_skips_gaps() -> None:
    values = [2.0 if i % 7 else None for i in range(100)]
    means = smooth(values, half_life=5)
    assert [mean is None for mean in means] == [value is None for value in values]
    # a weighted mean of equal numbers: each of the 100 additions rounds by 2**-53 relative, on both sums
    assert all(abs(mean - 2.0) <= 2.0 * 200 * 2**-53 for mean in means if mean is not None)


@pytest.mark.parametrize("panels", [TRAINING, MACHINE, (*MACHINE, Panel("A new one", "s", ("seconds",), 120))])
def test_panels_fill_the_height_without_overlaps(
    panels: tuple[Panel, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "MACHINE", panels)
    run = read_run(made_up_run.write_run(tmp_path / "small", steps=60, every=1))
    smooth_losses(run)
    figure = machine_figure(run)
    axes = [figure.layout[f"yaxis{i or ''}"] for i in range(1, len(panels) + 1)]
    plot_px = figure.layout.height - figure.layout.margin.t - figure.layout.margin.b
    for panel, axis in zip(panels, axes, strict=True):
        assert (axis.domain[1] - axis.domain[0]) * plot_px == pytest.approx(panel.px)
    for upper, lower in pairwise(axes):
        assert (upper.domain[0] - lower.domain[1]) * plot_px == pytest.approx(TITLE_PX)
    assert axes[-1].domain[0] == pytest.approx(0)
