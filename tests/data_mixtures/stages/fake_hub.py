"""A local hub: the endpoints that huggingface_hub asks for a dataset, over a mirror's folder.

    /api/datasets/REPO/auth-check, /revision/REV, /tree/REV[/FOLDER] (in pages
    of two), /datasets/REPO/resolve/REV/PATH

Repositories whose name ends in "Gated" need the token "good"; `flaws` are answers that go wrong,
once each, in order.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

from flask import Response, jsonify, request, send_file

from tests.data_mixtures.local_server import LocalServer

COMMIT = "abcdef0" + "1" * 33
PAGE = 2


class FakeHub(LocalServer):
    """`with FakeHub(folder) as hub:` serves at hub.url; hub.requests are the paths of its requests."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.requests: list[str] = []
        self.flaws: list[str] = []
        repo = "datasets/<owner>/<name>/<what>"
        for path in (f"/api/{repo}", f"/api/{repo}/<path:rest>", f"/{repo}/<path:rest>"):
            self.app.add_url_rule(path, path, self.answer)

    def answer(self, owner: str, name: str, what: str, rest: str = "") -> Any:
        self.requests.append(request.path)
        repo = self.root / owner / name
        revision, _, below = rest.partition("/")
        if not repo.is_dir():
            return refusal(404, "RepoNotFound")
        # listing a gated repository needs no token, as on the hub
        needs_token = name.endswith("Gated") and what in ("auth-check", "resolve")
        if needs_token and request.headers.get("Authorization") != "Bearer good":
            return refusal(403, "GatedRepo")
        if what == "auth-check":
            return {}
        if not COMMIT.startswith(revision) and revision != "main":
            return refusal(404, "RevisionNotFound")
        if what == "revision":
            counts = {"private": False, "downloads": 0, "likes": 0}
            return {"id": f"{owner}/{name}", "sha": COMMIT, "siblings": [], "tags": [], **counts}
        if not (repo / below).exists():
            return refusal(404, "EntryNotFound")
        return list_files(repo, below) if what == "tree" else self.send(repo / below)

    def send(self, path: Path) -> Any:
        data = path.read_bytes()
        etag = hashlib.sha256(data).hexdigest()
        if request.method == "GET" and "Range" not in request.headers and self.flaws:
            if self.flaws.pop(0) == "500":
                return refusal(500, "OutOfOrder")
            # one byte differs, the size does not
            data = data[:-1] + b"?"
        response = send_file(
            io.BytesIO(data), "application/octet-stream", conditional=True, etag=etag
        )
        response.headers["X-Repo-Commit"] = COMMIT
        response.headers["X-Linked-Size"] = str(len(data))
        return response


def refusal(status: int, code: str) -> tuple[dict[str, str], int, dict[str, str]]:
    return {"error": code}, status, {"X-Error-Code": code}


def list_files(repo: Path, below: str) -> Response:
    recursive = request.args.get("recursive")
    paths = (repo / below).rglob("*") if recursive == "True" else (repo / below).iterdir()
    entries = [describe(repo, path) for path in sorted(paths)]
    first = int(request.args.get("cursor", 0))
    last = first + PAGE
    page = jsonify(entries[first:last])
    if last < len(entries):
        more = f"{request.base_url}?recursive={recursive}&cursor={last}"
        page.headers["Link"] = f'<{more}>; rel="next"'
    return page


def describe(repo: Path, path: Path) -> dict[str, Any]:
    entry = {"path": str(path.relative_to(repo)), "oid": "0" * 40}
    if path.is_dir():
        return {"type": "directory", **entry}
    data = path.read_bytes()
    lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return {"type": "file", **entry, "size": len(data), "lfs": lfs}
