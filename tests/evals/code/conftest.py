"""A fake server that answers the problems of code_assets."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from evals.scorer import endpoint as endpoint_scorer
from tests.evals.code.code_assets import PROBLEMS


class Endpoint(ThreadingHTTPServer):
    """Answers with the reference solution of the asked problem.

    requests: their bodies and headers. statuses: of the next replies; 206 breaks the connection off.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.statuses: list[int] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        headers = {"path": self.path, "authorization": self.headers["Authorization"]}
        self.server.requests.append(body | headers)
        prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        (problem,) = [p for p in PROBLEMS if p["prompt"].strip() in prompt]
        code = problem["canonical_solution"]
        if "messages" in body:
            text = f"Here it is.\n```python\n{problem['prompt']}{code}```"
            choice: dict[str, Any] = {"message": {"content": text}, "finish_reason": "stop"}
        else:
            choice = {"text": code + "\nprint(1)\n", "finish_reason": "length"}
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        reply = json.dumps({"choices": [choice]} if status == 200 else {"error": "no"})
        self.send_response(status)
        self.send_header("Content-Length", str(len(reply) + (status == 206)))
        self.end_headers()
        self.wfile.write(reply.encode())

    def log_message(self, *arguments):
        pass


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setattr(endpoint_scorer, "FIRST_WAIT_S", 0.0)
    with Endpoint() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        yield server
        server.shutdown()
