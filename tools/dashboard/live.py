"""The dashboard of a running job: a file that is rewritten when the run's files change, or a page served locally.

Both only read the run folder. The server listens on this machine alone; from elsewhere, forward its port through ssh.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from records.run import stamp

HOST = "127.0.0.1"
REST = 4.0  # idle time after making a page, as a multiple of the time it took: at most a fifth of a login node's core
QUIET_S = 60  # the page is remade at least this often: it says since when a run has been quiet


def version_of(folders: Sequence[Path]) -> str:
    """Changes with the runs' files, and with the minute."""
    return f"{hash((stamp(folders), int(time.time() // QUIET_S))) & 0xFFFFFFFFFFFF:x}"


def watch(folders: Sequence[Path], write: Callable[[], Any], every_s: float) -> None:
    """Call `write` whenever the runs have changed, until the process is interrupted (KeyboardInterrupt)."""
    written = ""
    while True:
        version = version_of(folders)
        if version != written:
            started = time.monotonic()
            write()
            written = version
            every_s = max(every_s, REST * (time.monotonic() - started))
        time.sleep(every_s)


@dataclass
class Live:
    """What the server hands out, made at most once for each state of the run folders."""

    folders: Sequence[Path]
    body: Callable[[], str]  # the inner HTML of <main>
    page: Callable[[str, str], str]  # (inner HTML of <main>, version) -> the whole page
    rest: float = REST
    version: str = ""
    main: str = ""
    not_before: float = 0.0  # on the monotonic clock
    lock: threading.Lock = field(default_factory=threading.Lock)

    def newest(self) -> tuple[str, str]:
        """(version, inner HTML of <main>)."""
        with self.lock:
            version, now = version_of(self.folders), time.monotonic()
            if version != self.version and now >= self.not_before:
                self.main = self.body()
                self.version = version
                took_s = time.monotonic() - now
                self.not_before = now + took_s + self.rest * took_s
            return self.version, self.main


def serve(live: Live, port: int, ready: Callable[[str], None]) -> None:
    """Serve the page at / and its changes at /data.json until the process is interrupted; port 0 takes a free one."""
    try:
        server = ThreadingHTTPServer((HOST, port), _handler(live))
    except OSError as problem:
        raise ValueError(f"port {port} of {HOST} cannot be used ({problem}); give another --port, or 0") from problem
    with server:
        ready(f"http://{HOST}:{server.server_address[1]}/")
        server.serve_forever()


def _handler(live: Live) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            address = urlsplit(self.path)
            if (self.headers.get("Host") or "").rsplit(":", 1)[0] not in (HOST, "localhost"):
                self.send_error(403)  # a name that some web page made point here
            elif address.path not in ("/", "/data.json"):
                self.send_error(404)
            else:
                version, main = live.newest()
                if address.path == "/":
                    self._answer(live.page(main, version), "text/html; charset=utf-8")
                elif parse_qs(address.query).get("version") == [version]:
                    self.send_response(204)
                    self.end_headers()
                else:
                    self._answer(json.dumps({"version": version, "main": main}), "application/json")

        def _answer(self, text: str, kind: str) -> None:
            content = text.encode()
            self.send_response(200)
            for key, value in (("Content-Type", kind), ("Content-Length", len(content)), ("Cache-Control", "no-store")):
                self.send_header(key, str(value))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *unused: Any) -> None:
            """Polling requests are not logged."""

    return Handler
