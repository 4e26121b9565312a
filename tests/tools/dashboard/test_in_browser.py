"""The page under a reader's hands, in a real browser: legends, smoothing, zoom, scales; a run
of the published size.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from records.page import colour
from records.run import read_run
from tests.browser import Page, needs_browser
from tests.tools.dashboard import made_up_run
from tools.dashboard.__main__ import write_page
from tools.dashboard.figures import comparison_figure, source_places
from tools.dashboard.rows import prepare

NOW = 1.79e9 + 3600
DRAWN = "document.body?.dataset.drawn === ''"
SLOW_S = 120.0  # on a machine that does much else
TRAINING, SOURCES = "training-one", "sources-one"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    runs = tmp_path_factory.mktemp("runs")
    return [made_up_run.write_run(runs / name, steps, every=1) for name, steps in (("one", 360), ("two", 40))]


@pytest.fixture(scope="module")
def html(folders: list[Path]) -> Path:
    out = folders[0].parent / "dashboard.html"
    write_page(folders, out, now=NOW)
    return out


def open_page(page: Page, html: Path) -> None:
    page.call("Page.navigate", url=html.as_uri())
    page.until(DRAWN, SLOW_S)


@pytest.fixture(scope="module")
def browser(html: Path) -> Iterator[Page]:
    page = Page(html.parent / "profile")
    page.size(1400, 1000)
    open_page(page, html)
    yield page
    page.close()


@pytest.fixture
def page(browser: Page) -> Page:
    """The drawn page, every chart as at first."""
    browser.run(
        "Promise.all([...document.querySelectorAll('.chart > div')].map(place => { place.state = {chosen:"
        "firsts(place.figure.layout.meta), off: new Set(), x: null, y: {}, whole: false}; return render(place) }))"
    )
    return browser


def traces(page: Page, chart: str) -> list[dict[str, Any]]:
    fields = "{y: t.y, x: t.x, group: t.legendgroup, visible: t.visible !== false, opacity: t.opacity ?? 1}"
    return page.run(f"document.getElementById('{chart}').data.map(t => ({fields}))")


def press(page: Page, chart: str, button: str) -> None:
    page.run(f"press(document.getElementById('{chart}').closest('.figure').querySelector('{button}'), false)")


def axis(page: Page, chart: str, name: str = "yaxis") -> list[float]:
    return page.run(f"document.getElementById('{chart}')._fullLayout.{name}.range.map(Number)")


def mouse(page: Page, kind: str, x: float, y: float, clicks: int = 1) -> None:
    page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=clicks)


def plot_box(page: Page, chart: str) -> list[float]:
    """Left, top, width and height of the first panel of a chart, in view."""
    page.run(f"document.getElementById('{chart}').scrollIntoView({{block: 'center', behavior: 'instant'}})")
    box = f"document.getElementById('{chart}').querySelector('.nsewdrag[data-subplot=xy]').getBoundingClientRect()"
    return page.run(f"(b => [b.left, b.top, b.width, b.height])({box})")


def drag(page: Page, start: tuple[float, float], end: tuple[float, float]) -> None:
    mouse(page, "mouseMoved", *start)
    mouse(page, "mousePressed", *start)
    for share in (0.3, 0.7, 1):
        mouse(page, "mouseMoved", *(a + share * (b - a) for a, b in zip(start, end, strict=True)))
    mouse(page, "mouseReleased", *end)


@pytest.mark.rotate
@needs_browser
def test_a_click_in_the_legend_hides_and_a_double_click_isolates(page: Page) -> None:
    def shown() -> set[str]:
        return {trace["group"] for trace in traces(page, SOURCES) if trace["visible"]}

    button = f"document.getElementById('{SOURCES}').closest('.figure').querySelector('[data-group=math]')"
    everything = shown()
    assert everything == {"web", "stdlib", "math"}
    page.run(f"{button}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    x, y = page.run(f"(b => [b.left + b.width / 2, b.top + b.height / 2])({button}.getBoundingClientRect())")
    for kind in ("mousePressed", "mouseReleased"):
        mouse(page, kind, x, y)
    page.until(f"{button}.getAttribute('aria-pressed') === 'false'", SLOW_S)
    assert shown() == everything - {"math"}
    for clicks in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            mouse(page, kind, x, y, clicks)
    page.until(f"{button}.getAttribute('aria-pressed') === 'true'", SLOW_S)
    assert shown() == {"math"}


@pytest.mark.rotate
@needs_browser
def test_smoothing_changes_the_mean_and_not_the_logged_values(page: Page, folders: list[Path]) -> None:
    before = traces(page, TRAINING)
    raw = [i for i, trace in enumerate(before) if trace["opacity"] == 0.3]
    press(page, TRAINING, "[data-option=off]")
    off = traces(page, TRAINING)
    changed = [i for i, (a, b) in enumerate(zip(before, off, strict=True)) if a["y"] != b["y"]]
    assert len(raw) == 5, "one an attempt"
    assert len(changed) >= 4
    assert not {*changed} & {*raw}
    run = read_run(folders[0])
    prepare(run)
    for drawn, key in ((before, "smooth_loss"), (off, "loss")):
        known = {float(f"{row[key]:.6g}") for row in run.kept_rows}
        assert all({*drawn[i]["y"]} <= known for i in changed), "of all rows, not of those that are drawn"
    press(page, TRAINING, "[data-option=on]")
    assert traces(page, TRAINING) == before


@pytest.mark.rotate
@needs_browser
def test_a_log_axis_shows_all_that_is_drawn(page: Page) -> None:
    press(page, TRAINING, "[data-option=log]")
    assert page.run(f"document.getElementById('{TRAINING}')._fullLayout.yaxis.type") == "log"
    lowest = min(y for t in traces(page, TRAINING) if t["opacity"] == 0.3 for y in t["y"] if y)
    low, high = axis(page, TRAINING)
    assert 10**low < lowest < 10**high < 20
    press(page, TRAINING, "[data-option=linear]")
    assert page.run(f"document.getElementById('{TRAINING}')._fullLayout.yaxis.type") == "linear"


@pytest.mark.rotate
@needs_browser
def test_zoom_fits_y_and_y_zooms_alone_and_a_double_click_resets(page: Page) -> None:
    at_first = axis(page, TRAINING), axis(page, TRAINING, "xaxis")
    left, top, width, height = plot_box(page, TRAINING)
    middle = top + height / 2
    state = f"document.getElementById('{TRAINING}').state"
    drag(page, (left + 0.8 * width, middle), (left + 0.95 * width, middle))
    page.until(f"{state}.x", SLOW_S)
    page.run(f"render(document.getElementById('{TRAINING}'))")  # awaited
    (low, high), (start, end) = axis(page, TRAINING), axis(page, TRAINING, "xaxis")
    assert end - start == pytest.approx(0.15 * (at_first[1][1] - at_first[1][0]), rel=0.05)
    inside = [y for t in traces(page, TRAINING) if t["opacity"] == 0.3
              for x, y in zip(t["x"], t["y"], strict=True) if start <= x <= end]  # fmt: skip
    assert low < min(inside)
    assert high - low < 0.5 * (at_first[0][1] - at_first[0][0]), "the steep beginning is out of sight"
    drag(page, (left + 0.5 * width, top + 0.3 * height), (left + 0.5 * width, top + 0.6 * height))
    page.until(f"{state}.y.yaxis", SLOW_S)
    page.run(f"render(document.getElementById('{TRAINING}'))")
    closer = axis(page, TRAINING)
    assert closer[1] - closer[0] == pytest.approx(0.3 * (high - low), rel=0.1)
    assert axis(page, TRAINING, "xaxis") == [start, end]
    place = f"document.getElementById('{TRAINING}')"  # the machine may be slow, and the drags are no clicks
    page.run(f"{place}._context.doubleClickDelay = 1e6, {place}._mouseDownTime = 0")
    end_s = time.monotonic() + SLOW_S
    while not page.run(
        f"{state}.x === null"
    ):  # between two clicks that come late, the chart can be drawn anew
        assert time.monotonic() < end_s, f"no double click resets the chart: {page.console}"
        for clicks in (1, 2):
            for kind in ("mousePressed", "mouseReleased"):
                mouse(page, kind, left + width / 2, middle, clicks)
        settled_s = time.monotonic() + 1  # a click that is not answered within a second was lost
        while not page.run(f"{state}.x === null") and time.monotonic() < settled_s:
            time.sleep(0.02)
    page.run(f"render(document.getElementById('{TRAINING}'))")
    assert (axis(page, TRAINING), axis(page, TRAINING, "xaxis")) == at_first
    press(page, TRAINING, "[data-act=autoscale]")
    whole = axis(page, TRAINING)
    highest = max(y for t in traces(page, TRAINING) for y in t["y"] if t["opacity"] == 0.3)
    assert whole[1] > highest > at_first[0][1], "the start and the tips of spikes too"


@pytest.mark.rotate
@needs_browser
def test_the_steep_start_of_a_long_curve_does_not_flatten_the_rest(page: Page) -> None:
    def fitted(values: int, state: str = "x: null, whole: false", more: str = "") -> list[float]:
        y = [9 / i + 1 for i in range(1, values + 1)]
        trace = f"{{legendgroup: 'bits', x: {[*range(values)]}, y: {y}}}"
        layout = "{yaxis: {rangemode: 'normal'}}"
        return page.run(
            f"(layout => {{ fit([{trace}{more}], layout, {{{state}, off: new Set()}}); return layout.yaxis.range }})"
            f"({layout})"
        )

    low, high = fitted(100)
    assert low < 1.09 < high < 3
    short = ", {legendgroup: 'short', x: [0, 1], y: [5, 4]}"
    assert fitted(100, more=short)[1] > 5, "a short curve is shown from its beginning"
    assert fitted(100, "x: null, whole: true")[1] > fitted(100, "x: [0, 99], whole: false")[1] * 0.99 > 9
    assert fitted(10)[1] > 10


@pytest.mark.rotate
@needs_browser
def test_the_chosen_button_looks_unlike_the_others(page: Page) -> None:
    for dark in (False, True):
        page.size(1400, 1000, dark)
        for chart, option in ((TRAINING, "steps"), ("sources-one", "off"), ("comparison", "log")):
            press(page, chart, f"[data-option={option}]")
            styles = page.run(
                f"[...document.getElementById('{chart}').closest('.figure').querySelectorAll('[data-choice]')].map("
                "b => [b.ariaPressed, getComputedStyle(b).backgroundColor, getComputedStyle(b).color, b.textContent])"
            )
            chosen = {tuple(style[1:3]) for style in styles if style[0] == "true"}
            others = {tuple(style[1:3]) for style in styles if style[0] == "false"}
            assert option in [style[3] for style in styles if style[0] == "true"]
            assert len(chosen) == len(others) == 1
            assert chosen.isdisjoint(others)
    page.size(1400, 1000)


@pytest.mark.rotate
@needs_browser
def test_jump_links_lead_to_their_cards(page: Page) -> None:
    links = page.run("[...document.querySelectorAll('.jump a')].map(a => a.getAttribute('href').slice(1))")
    assert len(links) == len({*links}) > 20
    assert page.run(f"{json.dumps(links)}.every(id => document.getElementById(id)?.querySelector('.card'))")


@pytest.mark.job
@needs_browser
def test_nothing_is_complained_of_and_nothing_is_wider_than_a_phone(page: Page) -> None:
    for width, dark in ((1400, False), (390, False), (390, True)):
        page.size(width, 900, dark)
        page.run("new Promise(done => setTimeout(done, 300))")
        assert page.run("document.documentElement.scrollWidth") <= width
    page.size(1400, 1000)
    assert page.console == []


# of the figures in the page


def figures_of(text: str) -> dict[str, list[dict[str, Any]]]:
    found = re.findall(
        r'<div id="([^"]+)"></div><script type="application/json">(.*?)</script>', text, flags=re.S
    )
    return {name: json.loads(content)["data"] for name, content in found}


def test_the_comparison_keeps_every_validation_point(folders: list[Path], html: Path) -> None:
    drawn = {trace.get("name"): trace["y"] for trace in figures_of(html.read_text())["comparison"]}
    for folder in folders:
        rows = [row for row in read_run(folder).kept_rows if row["valid_loss"] is not None]
        assert drawn[f"{folder.name}, validation"] == [float(f"{row['valid_loss']:.6g}") for row in rows]
        assert len(rows) >= 30


def test_validation_points_are_kept_where_rows_are_left_out(tmp_path: Path) -> None:
    folder = made_up_run.write_run(tmp_path / "long", steps=1200, every=1)
    runs = [read_run(folder), read_run(folder)]
    for run in runs:
        prepare(run)
    line, validated, *_ = comparison_figure(runs).data
    assert len(line.y) < len(runs[0].kept_rows)
    assert len(validated.y) == sum(row["valid_loss"] is not None for row in runs[0].kept_rows) == 40


def test_a_source_has_one_colour_on_the_whole_page(folders: list[Path], html: Path) -> None:
    places = source_places(read_run(folders[0]))
    assert set(places) == set(made_up_run.SOURCES)
    seen = dict[str, set[str]]()
    for traces_of in figures_of(html.read_text()).values():
        for trace in traces_of:
            if trace.get("legendgroup") in places:
                seen.setdefault(trace["legendgroup"], set()).add(trace["line"]["color"])
    assert seen == {name: {colour(place)} for name, place in places.items()}


# a run of the published size


@pytest.mark.rotate
@needs_browser
def test_a_run_of_930_000_steps_and_200_checkpoints(tmp_path: Path) -> None:
    folder, out = made_up_run.write_published(tmp_path / "synthetic-2b"), tmp_path / "2b.html"
    began = time.monotonic()
    [run] = write_page([folder], out, now=NOW)
    written_s, megabytes = time.monotonic() - began, out.stat().st_size / 1e6
    assert sum(s.logged for s in run.segments if s.kept) == 93_000
    assert "Synthetic figures: no such run took place." in out.read_text()
    page = Page(tmp_path / "profile")
    for width, dark in ((1400, False), (390, True)):
        page.size(width, 1000, dark)
        began = time.monotonic()
        page.call("Page.navigate", url="about:blank")
        open_page(page, out)
        drawn_s = time.monotonic() - began
        print(f"{width} px: written in {written_s:.1f} s, {megabytes:.1f} MB, drawn in {drawn_s:.1f} s")
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.run("document.querySelectorAll('.chart .main-svg').length") >= 3 * 10
        assert page.console == []
    page.close()
    assert megabytes < 12, "plotly.js is 4.8 MB of it"
