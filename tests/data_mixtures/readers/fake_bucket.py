"""A bucket of one's own, like Software Heritage's: /content/SHA1 is the gzip-compressed object, or 404."""

from __future__ import annotations

import gzip
import hashlib
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeBucket:
    """`with FakeBucket(contents) as bucket:` serves at bucket.url; bucket.asked counts the requests by sha1.

    flaws: what a sha1 is answered with before its object, in order: a status, or bytes in its place. slow_s:
    seconds that every answer takes. down: 503 to all.
    """

    def __init__(self, contents: list[bytes], slow_s: float = 0.0) -> None:
        self.objects = {sha1(each): gzip.compress(each) for each in contents}
        self.asked: Counter[str] = Counter()
        self.flaws: dict[str, list[int | bytes]] = {}
        self.slow_s, self.down = slow_s, False
        self.server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"bucket": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}/content/{{sha1}}"

    def __enter__(self) -> FakeBucket:
        options = {"poll_interval": 0.02}
        threading.Thread(target=self.server.serve_forever, kwargs=options, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # all connections at once


class _Handler(BaseHTTPRequestHandler):
    bucket: FakeBucket
    disable_nagle_algorithm = True
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        name = self.path.removeprefix("/content/")
        self.bucket.asked[name] += 1
        time.sleep(self.bucket.slow_s)
        flaws = self.bucket.flaws.get(name)
        body: int | bytes = flaws.pop(0) if flaws else self.bucket.objects.get(name, 404)
        if self.bucket.down:
            body = 503
        status, data = (200, body) if isinstance(body, bytes) else (body, b"no")
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
