"""The dashboard while a job runs: the served page, and its charts updated in a real browser."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from records.run import Following, read_run
from tests.browser import browse, needs_browser
from tests.tools.dashboard import made_up_run
from tools.dashboard.__main__ import Live, content_of, prepared, serve
from tools.dashboard.zoom import traces_in

ROOT = Path(__file__).resolve().parents[3]


def dashboard(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "tools.dashboard", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def until(true: Callable[[], bool], limit_s: float = 300) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def log_step(run: Path, step: int, loss: float) -> None:
    row = {
        "step": step,
        "attempt": 2,
        "phase": "phase2",
        "loss": loss,
        "tokens": step * 100,
        "tokens_total": 10**6,
    }
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return made_up_run.write_run(tmp_path / "made-up", steps=60, every=1)


@pytest.fixture
def served(run_folder: Path) -> Iterator[tuple[Path, str]]:
    process = dashboard(str(run_folder), "--serve", "--port", "0", "--every-s", "0.2")
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(r"http://127\.0\.0\.1:\d+/", line)
        assert found, line
        yield run_folder, found[0]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def get(address: str, **headers: str) -> tuple[int, str]:
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=30) as answer:
        return answer.status, answer.read().decode()


@pytest.mark.rotate
def test_the_server_answers_with_what_is_new(served: tuple[Path, str]) -> None:
    run, address = served
    status, page = get(address)
    assert status == 200
    assert "connect-src 'self'" in page
    version = re.findall(r'data-version="(\w+)"', page)[0]
    # the version also changes with the minute, hence at most one answer with content in two
    statuses = [get(f"{address}data.json?version={version}")[0]]
    if statuses[0] == 200:
        version = json.loads(get(f"{address}data.json")[1])["version"]
        statuses.append(get(f"{address}data.json?version={version}")[0])
    assert statuses[-1] == 204
    log_step(run, 31, 1.234567)
    until(lambda: "1.23457" in get(f"{address}data.json?version={version}")[1])
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(f"{address}../../etc/passwd")
    with pytest.raises(urllib.error.HTTPError, match="403"):
        get(address, Host="elsewhere.example")


@pytest.mark.rotate
def test_a_taken_port_is_told(served: tuple[Path, str]) -> None:
    run, address = served
    port = address.rsplit(":", 1)[1].strip("/")
    process = dashboard(str(run), "--serve", "--port", port)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert f"port {port} of 127.0.0.1 cannot be used" in said


@pytest.mark.rotate
def test_a_page_of_a_run_that_grows_is_that_of_the_whole_run(tmp_path: Path) -> None:
    """Rows are thinned and means go on, whatever the pieces; at the doubling of a bucket all is read again."""
    folder = made_up_run.write_run(tmp_path / "made-up", steps=2200, every=1)
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:-700]))
    live = Live([folder], "x", "", rest=0.0)
    first = live.newest() and live.followed[0].run
    for end in (-699, -640, -300, -299, -1, len(lines)):
        metrics.write_text("".join(lines[:end])[: -20 if end == -300 else None])
        main = live.newest()[1]
    assert live.followed[0].run is not first, "3,201 rows count"
    assert live.followed[0].run.half_life == 2 * first.half_life == 32
    assert len(live.followed[0].run.kept_rows) < 0.9 * len(read_run(folder).kept_rows)
    again = Live([folder], "x", "", rest=0.0).newest()[1]
    assert without_time(main) == without_time(again)


def without_time(main: str) -> str:
    return re.sub(r"<footer>.*|quiet since.*? UTC", "", main)


@pytest.mark.rotate
def test_a_change_of_the_page_is_as_small_as_what_was_appended(run_folder: Path) -> None:
    live = Live([run_folder], "x", "", rest=0.0)
    held, main = live.newest()
    log_step(run_folder, 31, 1.234567)
    live.newest()
    change, whole = json.dumps(live.changes(held)), json.dumps(live.changes("unknown"))
    assert "1.23457" in change
    assert len(change) < 0.2 * len(whole)
    assert live.changes(live.version)["change"] is None
    content = content_of(main)
    assert patched(content, live.changes(held)["change"]) == live.changes("")["change"]["to"]
    assert json.loads(json.dumps(content)) == content, "names of figures are unique"


def patched(old: Any, change: Any) -> Any:
    """As `patch` in records/page.js does it."""
    if change is None or "to" in change:
        return change["to"] if change else old
    fresh = old[: change["size"]] if isinstance(old, list) else dict(old)
    for key, inner in change["at"].items():
        if isinstance(fresh, list) and key >= len(fresh):
            fresh.append(inner["to"])
        else:
            fresh[key] = patched(fresh[key], inner)
    return fresh


# zooms and chooses steps as a reader would, waits for the last of three changes, and tells what
# then stands there
PROBE = """
(async () => {
  const wait = ms => new Promise(done => setTimeout(done, ms));
  await wait(500);
  const chart = document.getElementById('training-made-up');
  chart.mark = 'the same element';
  const chosen = () => document.getElementById('training-made-up').closest('.figure')
    .querySelector('[data-choice=x][aria-pressed=true]').dataset.option;
  chart.closest('.figure').querySelector('[data-option=steps]').click();
  await wait(200);
  await Plotly.relayout(chart, {'xaxis.range': [10, 50]});
  while (!document.querySelector('.state').textContent.includes('step 33')) await wait(100);
  await wait(500);
  const now = document.getElementById('training-made-up'), range = now.layout.xaxis.range;
  now.closest('.figure').querySelector('[data-act=reset]').click();  // zoomed, it has the rows of the range
  await wait(300);
  const xs = now.data.map(trace => Math.max(...trace.x));
  console.log('TOLD ' + JSON.stringify([now.mark, range, chosen(), Math.max(...xs),
    document.querySelectorAll("#training-made-up").length, document.querySelectorAll('main').length]));
})();
"""


@pytest.mark.rotate
@needs_browser
def test_a_browser_updates_the_charts_in_place(run_folder: Path, tmp_path: Path) -> None:
    """Curves and text become new; the chart's element, its zoom and the chosen axis stay;
    nothing is complained of.
    """
    coming = [31, 32, 33]

    class Growing(Live):
        """The run goes on at each look that the page takes."""

        def body(self) -> str:
            drawn = super().body()
            if coming:
                log_step(run_folder, coming.pop(0), 1.5)
            return drawn

    live = Growing([run_folder], "x", f"poll(200);{PROBE}", rest=0.0)
    address: list[str] = []
    threading.Thread(target=serve, args=(live, 0, address.append), daemon=True).start()
    until(lambda: bool(address))
    dom, console = browse(address[0], tmp_path / "profile", wait_ms=20_000)
    assert len(console) == 1, console
    told = json.loads(console[0].removeprefix("TOLD "))
    steps_of_phase_1 = 60
    assert told == ["the same element", [10, 50], "steps", steps_of_phase_1 + 33, 1, 1]
    assert len(re.findall(r'<svg[^>]*class="main-svg"', dom)) >= 4 * 3, "four charts of three layers each"


@pytest.mark.rotate
def test_a_zoom_gets_every_row_of_its_range(tmp_path: Path) -> None:
    """Of a run whose overview draws groups of rows; with the rows next to the range, so that lines leave it."""
    folder = made_up_run.write_run(tmp_path / "long", steps=2000, every=1)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["loss"] = 9.75 if (row["phase"], row["step"]) == ("phase1", 1000) else row["loss"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    live = Live([folder], "long", "")
    (run,) = prepared([Following(folder)], thinned=False)
    places = [row["x_step"] for row in run.kept_rows if 900 <= row["x_step"] <= 1100]
    overview = loss_of(content_of(live.newest()[1])["figures"]["training-long"]["data"])
    inside = [x for x in overview["meta"]["x"]["steps"]["x"] if 900 <= x <= 1100]
    assert len(inside) < 0.9 * len(places), "the overview has groups"
    drawn = live.zoomed("training-long", "steps", "900", "1100")
    assert drawn is not None
    x = [x for trace in drawn if is_loss(trace) for x in trace["meta"]["x"]["steps"]["x"]]
    assert set(places) <= set(x)
    assert len(set(x)) <= len(places) + 4, "and no more than the neighbours of each end"
    peak = next(trace for trace in drawn if is_loss(trace) and 9.75 in trace["y"])
    assert peak["y"][peak["y"].index(9.75) - 1] < 9 > peak["y"][peak["y"].index(9.75) + 1]
    assert live.zoomed("training-long", "steps", "1e9", "2e9") is None
    for wrong in (
        ("training-other", "steps", "1", "2"),
        ("training-long", "hours", "1", "2"),
        ("", "", "", ""),
    ):
        with pytest.raises(ValueError, match="no "):
            live.zoomed(*wrong)


@pytest.mark.rotate
def test_a_zoom_to_more_rows_than_pixels_has_medians_and_a_band(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The range of another figure than the last row's is in the band, a spike of one row too; validations stay."""
    folder = made_up_run.write_run(tmp_path / "long", steps=2000, every=1)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["loss"] = 9.75 if (row["phase"], row["step"]) == ("phase1", 1001) else row["loss"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run,) = prepared([Following(folder)], thinned=False)
    monkeypatch.setattr("tools.dashboard.zoom.BUCKETS", 32)
    drawn = traces_in(run, "training", "steps", 950, 1150)
    assert drawn is not None
    (medians,) = [trace for trace in drawn if is_loss(trace)]
    (band,) = [trace for trace in drawn if trace.get("name") == "Loss, lowest and highest"]
    count = len(medians["y"])
    assert 200 / 8 <= count <= 200 / 8 + 6, "one point a group of 8 rows, more at ends and validations"
    assert len(band["y"]) == 2 * count
    assert band["fill"] == "toself"
    high, low = band["y"][:count], band["y"][: count - 1 : -1]
    assert all(a <= b <= c for a, b, c in zip(low, medians["y"], high, strict=True))
    assert max(medians["y"]) < 9 < max(high) == 9.75
    at = high.index(9.75)
    (spike,) = [row for row in run.kept_rows if row["loss"] == 9.75]
    bucket = [r["loss"] for r in run.kept_rows if r["phase"] == "phase1" and r["n"] // 8 == spike["n"] // 8]
    assert medians["y"][at] == pytest.approx(median(bucket), rel=1e-5)
    assert max(high[at - 1], high[at + 1]) < 9
    validated = [x for x in validations(drawn) if 950 < x < 1150]
    assert validated == [r["x_step"] for r in run.kept_rows if r["valid_loss"] and 950 < r["x_step"] < 1150]
    few = traces_in(run, "training", "steps", 1000, 1010)
    assert few is not None
    assert not any(trace.get("fill") for trace in few), "of few rows all are drawn"


def validations(traces: list[dict[str, Any]]) -> list[int]:
    """The steps of the drawn validations."""
    return [
        x
        for trace in traces
        if trace.get("name") == "validation loss"
        for x in trace["meta"]["x"]["steps"]["x"]
    ]


def is_loss(trace: dict[str, Any]) -> bool:
    return trace.get("name") == "Loss" and trace.get("yaxis") == "y"


def loss_of(traces: list[dict[str, Any]]) -> dict[str, Any]:
    return max(filter(is_loss, traces), key=lambda trace: len(trace["y"]))
