"""Tests of the page in a real browser: legends, zoom, scales, downloads, phones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from records.files import read_lines
from tests.browser import Page, needs_browser
from tests.records.lines import write_lines
from tests.tools.dashboard import made_up_run
from tools.dashboard.__main__ import write_page

NOW = 1.79e9 + 3600
# on a machine that does much else
SLOW_S = 120.0
TRAINING = "document.getElementById('training-one')"
SOURCES = "document.getElementById('sources-one')"


def open_page(page: Page, html: Path) -> None:
    page.call("Page.navigate", url=html.as_uri())
    page.until("document.body?.dataset.drawn === ''", SLOW_S)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    folder = made_up_run.write_run(runs / "one", 360)
    rows = read_lines(folder / "metrics.jsonl")
    # a spike, which must not flatten the rest
    rows[-30]["loss"] = rows[-60]["grad_norm"] = 1e4
    rows[-90]["loss"] = -50.0
    for i, row in enumerate(rows):
        # a value without neighbours has no line
        row["mfu"] = 38.0 if i == 7 else None
    write_lines(folder / "metrics.jsonl", rows)
    write_lines(runs / "two/metrics.jsonl", [{"step": 1, "loss": 2.5}])
    line = [{"step": step, "loss": 3.0 - 0.01 * step} for step in range(40)]
    write_lines(runs / "linear/metrics.jsonl", line)
    write_page([folder, runs / "two", runs / "linear"], runs / "dashboard.html", now=NOW)
    page = Page(runs / "profile")
    page.size(1400, 1000)
    open_page(page, runs / "dashboard.html")
    yield page
    page.close()


@pytest.fixture
def page(browser):
    # one browser for all tests, every chart as at first
    places = "[...document.querySelectorAll('.chart > div')]"
    browser.run(f"Promise.all({places}.map(p => {{ p.state = fresh(p.chart); return render(p) }}))")
    return browser


def visible_groups(page: Page, chart: str) -> set[str]:
    return {
        *page.run(f"{chart}.data.filter(t => t.visible && t.legendgroup).map(t => t.legendgroup)")
    }


def axis(page: Page, name: str = "yaxis") -> list[float]:
    return page.run(f"{TRAINING}._fullLayout.{name}.range.map(Number)")


def press(page: Page, chart: str, what: dict[str, Any], twice: bool = False) -> None:
    page.run(f"press({chart}, {json.dumps(what)}, {json.dumps(twice)})")


@pytest.mark.job
@needs_browser
def test_one_row_of_ten_thousand_does_not_flatten_the_loss_and_a_value_alone_has_a_mark(page):
    assert axis(page)[1] < 10
    assert axis(page, "yaxis3")[1] < 20
    beyond = (
        f"{TRAINING}.data.flatMap(t => t.text?.filter?.(text => text.includes('the axis')) ?? [])"
    )
    texts = ["above the axis: 1.000e+4"] * 2 + ["below the axis: -50.00"]
    assert sorted(page.run(beyond)) == texts
    press(page, TRAINING, {"act": "everything"})
    assert axis(page)[1] > 1e4
    press(page, TRAINING, {"choice": "scale", "option": "log"})
    low, high = axis(page)
    assert low < 0.5
    # of a logarithmic axis, everything
    assert high > 4
    # a beginning that is not steep is shown whole
    linear = "document.getElementById('training-linear')"
    assert page.run(f"{linear}._fullLayout.yaxis.range[1]") > 3.0
    one = "document.getElementById('training-two').data[0]"
    assert page.run(f"[{one}.mode, {one}.marker.size]") == ["lines+markers", [6]]
    mfu = "document.getElementById('machine-one').data.find(t => t.name === 'MFU')"
    assert page.run(f"{mfu}.marker.size.filter(size => size > 0).length") == 1


@pytest.mark.job
@needs_browser
def test_a_legend_hides_and_isolates_and_axes_change_together(page):
    press(page, SOURCES, {"group": "math"})
    assert visible_groups(page, SOURCES) == {"web", "stdlib"}
    press(page, SOURCES, {"group": "math"}, twice=True)
    assert visible_groups(page, SOURCES) == {"math"}
    assert (
        page.run(f"{SOURCES}.closest('.figure').querySelector('[data-group=web]').ariaPressed")
        == "false"
    )
    press(page, TRAINING, {"choice": "axis", "option": "time"})
    assert page.run(f"{TRAINING}._fullLayout.xaxis.type") == "date"
    assert page.run(f"{TRAINING}.layout.shapes[0].x0") == 1000 * made_up_run.START
    press(page, TRAINING, {"choice": "axis", "option": "steps"})
    assert axis(page, "xaxis")[1] > 500


@pytest.mark.job
@needs_browser
def test_a_drag_zooms_and_y_fits_what_is_in_sight(page):
    press(page, TRAINING, {"choice": "axis", "option": "steps"})
    before, (first, last) = axis(page), axis(page, "xaxis")
    page.run(f"{TRAINING}.scrollIntoView({{block: 'start', behavior: 'instant'}})")
    box = f"{TRAINING}.querySelector('.nsewdrag[data-subplot=xy]').getBoundingClientRect()"
    box_left, top, width, height = page.run(f"(b => [b.left, b.top, b.width, b.height])({box})")
    steps = [("mouseMoved", 0.5), ("mousePressed", 0.5), ("mouseMoved", 0.55), ("mouseMoved", 0.6)]
    for kind, share in [*steps, ("mouseReleased", 0.6)]:
        place = {"x": box_left + share * width, "y": top + height / 2}
        page.call(
            "Input.dispatchMouseEvent", type=kind, **place, button="left", buttons=1, clickCount=1
        )
    page.until(f"{TRAINING}.state.x", SLOW_S)
    # its promise is awaited: the axes have their new range
    page.run(f"render({TRAINING})")
    start, end = axis(page, "xaxis")
    assert end - start == pytest.approx(0.1 * (last - first), rel=0.05)
    low, high = axis(page)
    assert high - low < 0.7 * (before[1] - before[0])
    press(page, TRAINING, {"act": "reset"})
    assert axis(page, "xaxis") == [first, last]


@pytest.mark.job
@needs_browser
def test_the_data_of_a_chart_can_be_downloaded_and_nothing_is_wider_than_a_phone(page):
    head, *lines = page.run(f"csv({TRAINING}.chart)").splitlines()
    assert head == 'panel,curve,group,"tokens","steps","time",value,low,high'
    assert len(lines) == page.run(f"{TRAINING}.chart.curves.reduce((n, c) => n + c.y.length, 0)")
    assert lines[0].startswith(f'"Loss","Loss","phase1",{made_up_run.TOKENS_A_STEP},1,2026-')
    core = page.run("csv(document.getElementById('core-one').chart)").splitlines()[1].split(",")
    assert float(core[-2]) < float(core[-3]) < float(core[-1])
    links = page.run(
        "[...document.querySelectorAll('.jump a')].map(a => a.getAttribute('href').slice(1))"
    )
    assert page.run(
        f"{json.dumps(links)}.every(id => document.getElementById(id)?.querySelector('.card'))"
    )
    for width, dark in ((1400, False), (390, False), (390, True)):
        page.size(width, 900, dark)
        page.run("new Promise(done => setTimeout(done, 300))")
        assert page.run("document.documentElement.scrollWidth") <= width
    page.size(1400, 1000)
    assert page.console == []
