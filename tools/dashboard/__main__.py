"""One self-contained HTML page of one or more runs: what was trained, its progress, and what was measured.

    python -m tools.dashboard runs/demo --out runs/demo/dashboard.html    (once)
    python -m tools.dashboard runs/phase1 --serve --port 8765             (served locally, charts updated in place)

The page is one file with plotly.js inside; its policy makes the browser refuse the network. What has
no figure says "not measured". records.run reads a run, figures.py, panels.py and core.py draw,
cards.py and scores.py write the cards. The server listens on this machine alone; from elsewhere,
forward its port through ssh.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs, urlsplit

import tyro
from plotly.offline import get_plotlyjs
from plotly.utils import PlotlyJSONEncoder

from records.files import JsonObject, write_atomically
from records.page import html_page, utc
from records.run import Following, Run, stamp
from tools.dashboard import cards
from tools.dashboard.comparison import comparison
from tools.dashboard.core import core_card
from tools.dashboard.health import drafts_card, incidents_card, layers_card, usage_card
from tools.dashboard.listings import contamination_card, evaluations_card, samples_card
from tools.dashboard.rows import prepare
from tools.dashboard.scores import scores_card
from tools.dashboard.tasks import gold_card, tasks_card
from tools.dashboard.zoom import CHARTS, traces_in

HOST = "127.0.0.1"
PARTS: dict[str, Callable[[Run], str]] = {  # in the order of the page, by their names in the jump links
    "CORE": core_card, "Training": cards.training_card, "Gold bits": gold_card,
    "Sources": cards.sources_card, "Positions": cards.positions_card, "Held-out text": cards.bits_card,
    "Tasks": tasks_card, "Scores": scores_card, "Samples": samples_card, "Decode speed": cards.decode_card,
    "Drafts": drafts_card, "Machine": cards.machine_card, "Layers": layers_card, "Cost": usage_card,
    "Incidents": incidents_card,
    "Contamination": contamination_card, "Evaluations": evaluations_card, "Provenance": cards.provenance_card,
}  # fmt: skip
FIGURE = re.compile('<div id="([^"]+)"></div><script type="application/json">(.*?)</script>', re.DOTALL)
VERSIONS = 4  # of the page, that a reader may have
REST = 4.0  # idle time after making a page, as a multiple of the time it took: at most a fifth of a login node's core


def page_body(runs: Sequence[Run], now: float) -> str:
    """The inner HTML of <main>: a comparison when there are several runs, a section for each (prepared) run."""
    sections = [
        comparison(runs) if len(runs) > 1 else "",
        *(run_section(run, i, now) for i, run in enumerate(runs)),
    ]
    return f"{''.join(sections)}<footer>Drawn {utc(now)} UTC from the files of the run.</footer>"


def run_section(run: Run, index: int, now: float) -> str:
    """The header of a run, links to its cards, and those cards that have something to show."""
    head = cards.header(run, now)
    written = {name: html for name, write in PARTS.items() if (html := write(run))}
    places = {name: f"run{index}-{name.lower().replace(' ', '-')}" for name in written}
    links = "".join(f'<a href="#{place}">{name}</a>' for name, place in places.items())
    absent = [name for name in PARTS if name not in written]
    body = "".join(f'<div class="part" id="{places[name]}">{html}</div>' for name, html in written.items())
    warnings = "".join(f"<li>{escape(warning)}</li>" for warning in run.warnings)
    told = f'<ul class="warnings">{warnings}</ul>' if warnings else ""
    rest = f'<p class="caption">Not measured: {", ".join(absent)}.</p>' if absent else ""
    return f'<article>{head}{told}{cards.tiles_of(run)}<nav class="jump">{links}</nav>{body}{rest}</article>'


def page(runs: Sequence[Run], now: float) -> str:
    """The whole page of runs that were read once, as text."""
    for run in runs:
        prepare(run)
    return html_page(title_of(runs), page_body(runs, now), get_plotlyjs())


def title_of(runs: Sequence[Run]) -> str:
    return " · ".join(run.name for run in runs)


def read_runs(followed: Sequence[Following], whole: bool = False) -> list[Run]:
    """All runs, with names that tell them apart: charts are named after their run."""
    runs = [each.read(whole) for each in followed]
    folders = [each.folder.resolve() for each in followed]
    for index, (run, folder) in enumerate(zip(runs, folders, strict=True)):
        run.name = folder.name
        if [each.name for each in folders].count(run.name) > 1:
            run.name = "/".join(folder.parts[-2:])
        if run.name in (other.name for other in runs[:index]):
            run.name += f" ({index + 1})"
    return runs


def prepared(followed: Sequence[Following], thinned: bool = True) -> list[Run]:
    """All runs as they are now, with what figures need."""
    runs = read_runs(followed)
    if not all(prepare(run, thinned) for run in runs):
        runs = read_runs(followed, whole=True)
        for run in runs:
            prepare(run, thinned)
    return runs


def write_page(folders: Sequence[Path], out: Path, now: float | None = None) -> list[Run]:
    """Write the page of these run folders to `out`, whole or not at all; returns what was read."""
    runs = read_runs(list(map(Following, folders)))
    text = page(runs, time.time() if now is None else now)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, text)
    return runs


# --- while a job runs
# --------------------------------------------------------------------------------------------


def version_of(folders: Sequence[Path]) -> str:
    """Changes with the runs' files, and with the minute: the page says since when a run has been quiet."""
    return f"{hash((stamp(folders), int(time.time() // 60))) & 0xFFFFFFFFFFFF:x}"


@dataclass
class Live:
    """What the server hands out, made at most once for each state of the run folders."""

    folders: Sequence[Path]
    title: str
    script: str  # what keeps the page up to date
    rest: float = REST
    version: str = ""
    main: str = ""  # the inner HTML of <main>
    contents: dict[str, JsonObject] = field(default_factory=dict)  # of the latest versions, see `content_of`
    not_before: float = 0.0  # on the monotonic clock
    followed: list[Following] = field(default_factory=list)
    every_row: list[Following] = field(
        default_factory=list
    )  # the runs with all rows, once a reader has zoomed
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.followed = list(map(Following, self.folders))

    def zoomed(self, chart: str, axis: str, low: str, high: str) -> list[JsonObject] | None:
        """See `traces_in`; ValueError for a chart of no run."""
        with self.lock:
            self.every_row = self.every_row or list(map(Following, self.folders))
            for run in prepared(self.every_row, thinned=False):
                if (name := chart.removesuffix(f"-{run.name}")) in CHARTS:
                    return traces_in(run, name, axis, float(low), float(high))
        raise ValueError(
            f"{chart} is no chart of rows: {', '.join(CHARTS)}, with the name of a run behind it"
        )

    def page(self, version: str, main: str) -> str:
        return html_page(self.title, main, get_plotlyjs(), self.script, version, connect="'self'")

    def newest(self) -> tuple[str, str]:
        """(version, inner HTML of <main>); a new version costs what was appended and the drawing of a page."""
        with self.lock:
            version, now = version_of(self.folders), time.monotonic()
            if version != self.version and now >= self.not_before:
                main = self.body()
                self.contents = dict([*self.contents.items(), (version, content_of(main))][-VERSIONS:])
                self.main, self.version = main, version
                self.not_before = time.monotonic() + self.rest * (time.monotonic() - now)
            return self.version, self.main

    def body(self) -> str:
        return page_body(prepared(self.followed), time.time())

    def changes(self, held: str | None) -> JsonObject:
        """What a reader who has the content of version `held` needs for the newest; all of it if that is too old."""
        old = self.contents.get(held or "", None)
        version, new = list(self.contents.items())[-1]
        return {"version": version, "change": difference(old, new)}


def content_of(main: str) -> JsonObject:
    """The page as its script keeps it: `main` in pieces, one a card, and the figures by name, each only once."""
    figures = {name: json.loads(text) for name, text in FIGURE.findall(main)}
    return {
        "main": re.split('(?=<div class="part")', FIGURE.sub(r'<div id="\1"></div>', main)),
        "figures": figures,
    }


def difference(old: Any, new: Any) -> JsonObject | None:
    """What makes `new` of `old`, both JSON: {"to": new}, or {"at": {key or index: difference}} with the "size" of
    a list; None if they are equal. `patch` in records/page.js applies it.
    """
    if old == new:
        return None
    if isinstance(old, list) and isinstance(new, list):
        at = {i: {"to": v} if i >= len(old) else difference(old[i], v) for i, v in enumerate(new)}
        return {"at": {i: change for i, change in at.items() if change}, "size": len(new)}
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        return {"at": {key: change for key in new if (change := difference(old[key], new[key]))}}
    return {"to": new}


def serve(live: Live, port: int, ready: Callable[[str], None]) -> None:
    """Serve the page at /, its changes at /data.json and the rows of a zoom at /rows.json, until the process is
    interrupted.

    port: 0 takes a free one. ready: receives the address.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            address = urlsplit(self.path)
            if (self.headers.get("Host") or "").rsplit(":", 1)[0] not in (HOST, "localhost"):
                return self.send_error(403)  # a name that some web page made point here
            if address.path not in ("/", "/data.json", "/rows.json"):
                return self.send_error(404)
            asked = parse_qs(address.query)
            if address.path == "/rows.json":
                return self.rows(*(asked.get(name, [""])[0] for name in ("chart", "axis", "low", "high")))
            version, main = live.newest()
            if address.path == "/":
                self.answer(live.page(version, main), "text/html; charset=utf-8")
                return None
            if asked.get("version") == [version]:
                self.send_response(204)
                return self.end_headers()
            self.answer(json.dumps(live.changes(asked.get("held", [None])[-1])), "application/json")

        def rows(self, *asked: str) -> None:
            try:
                traces = live.zoomed(*asked)
            except ValueError:
                return self.send_error(400)
            return self.answer(json.dumps(traces, cls=PlotlyJSONEncoder), "application/json")

        def answer(self, text: str, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text.encode())))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *unused: object) -> None:
            """Polling requests are not logged."""

    try:
        server = ThreadingHTTPServer((HOST, port), Handler)
    except OSError as problem:
        raise ValueError(
            f"port {port} of {HOST} cannot be used ({problem}); give another --port, or 0"
        ) from problem
    with server:
        ready(f"http://{HOST}:{server.server_address[1]}/")
        server.serve_forever()


def main(
    run_dirs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    out: Path = Path("dashboard.html"),
    serve_runs: Annotated[bool, tyro.conf.arg(name="serve")] = False,
    port: int = 8765,
    every_s: float = 5.0,
) -> None:
    """Draw one or more run folders as one HTML file that needs no network, once or while they run.

    Args:
        run_dirs: run folders; several are compared
        out: HTML file to write
        serve_runs: serve the page on 127.0.0.1 instead of writing a file; its charts are updated in place
        port: port to serve on; 0 takes a free one
        every_s: with --serve, seconds between two checks for changes of the runs
    """
    if not run_dirs:
        raise ValueError(
            "no run folder given; for example: python -m tools.dashboard runs/demo --out dashboard.html"
        )
    if every_s <= 0:
        raise ValueError(
            f"--every-s {every_s} is not a positive number of seconds; give a value above 0, such as 5"
        )
    if serve_runs:
        with suppress(KeyboardInterrupt):
            live = Live(
                run_dirs, title_of(read_runs(list(map(Following, run_dirs)))), f"poll({1000 * every_s:.0f});"
            )
            serve(live, port, lambda address: print(f"{address}  (Ctrl-C to stop)", flush=True))
        return
    for run in write_page(run_dirs, out):
        print(
            f"{run.name}: {sum(s.logged for s in run.segments if s.kept)} logged steps, {len(run.evals)} evaluations"
        )
        for warning in run.warnings:
            print(f"  {warning}")
    print(f"{out} ({out.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    try:
        tyro.cli(main, prog="python -m tools.dashboard")
    except ValueError as error:
        raise SystemExit(f"dashboard: {error}") from None
