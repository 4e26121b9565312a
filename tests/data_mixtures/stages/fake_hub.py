"""A hub of one's own: the endpoints that huggingface_hub asks for a dataset, over a folder laid
out as a mirror.

    /api/datasets/REPO/auth-check, /revision/REV, /tree/REV[/FOLDER] (in pages
    of two), /datasets/REPO/resolve/REV/PATH

Repositories whose name ends in "Gated" need the token "good"; `flaws` are answers that go wrong,
once each, in order.
"""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "abcdef0" + "1" * 33
PAGE = 2


class FakeHub:
    """`with FakeHub(folder) as hub:` serves at hub.url; hub.asked are the requests, "METHOD PATH" each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.asked: list[str] = []
        self.flaws: list[str] = []
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        api = parts[0] == "api"
        _, owner, name, what, *rest = parts[1:] if api else parts
        repo = f"{owner}/{name}"
        if not (self.hub.root / repo).is_dir():
            self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        elif name.endswith("Gated") and what in ("auth-check", "resolve") and not self._has_token():
            self._json({"error": "gated"}, 403, {"X-Error-Code": "GatedRepo"})
        elif what == "auth-check":
            self._json({})
        elif not COMMIT.startswith(rest[0]) and rest[0] != "main":
            self._json({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
        elif what == "revision":
            counts = {"private": False, "downloads": 0, "likes": 0}
            self._json({"id": repo, "sha": COMMIT, "siblings": [], "tags": [], **counts})
        elif what == "tree":
            self._tree(repo, "/".join(rest[1:]))
        else:
            self._file(self.hub.root / repo / "/".join(rest[1:]))

    do_HEAD = do_GET

    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == "Bearer good"

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        kind = {"Content-Type": "application/json"}
        self._send(json.dumps(value).encode(), status, {**kind, **(headers or {})})

    def _send(self, data: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _tree(self, repo: str, folder: str) -> None:
        start, query = self.hub.root / repo / folder, parse_qs(urlsplit(self.path).query)
        if not start.is_dir():
            self._json({"error": "not there"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        found = start.rglob("*") if query.get("recursive") == ["True"] else start.iterdir()
        entries = [self._entry(repo, path) for path in sorted(found)]
        first = int(query.get("cursor", ["0"])[0])
        more = f"{self.hub.url}{urlsplit(self.path).path}?recursive={query['recursive'][0]}&cursor={first + PAGE}"
        headers = {"Link": f'<{more}>; rel="next"'} if first + PAGE < len(entries) else {}
        self._json(entries[first : first + PAGE], headers=headers)

    def _entry(self, repo: str, path: Path) -> dict[str, Any]:
        name = str(path.relative_to(self.hub.root / repo))
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": "0" * 40}
        data = path.read_bytes()
        lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return {"type": "file", "path": name, "oid": "0" * 40, "size": len(data), "lfs": lfs}

    def _file(self, path: Path) -> None:
        if not path.is_file():
            self._json({"error": "not there"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        data, status = path.read_bytes(), 200
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        headers = {"ETag": etag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        headers["X-Linked-Size"] = str(len(data))
        if (wanted := self.headers.get("Range")) and self.command == "GET":
            first, last = wanted.removeprefix("bytes=").split("-")
            headers["Content-Range"] = f"bytes {first}-{last or len(data) - 1}/{len(data)}"
            data, status = data[int(first) : int(last) + 1 if last else None], 206
        elif self.command == "GET" and self.hub.flaws:
            flaw = self.hub.flaws.pop(0)
            if flaw == "500":
                self._json({"error": "out of order"}, 500)
                return
            data = data[:-1] + b"?"  # one byte is another
        self._send(data, status, headers)
