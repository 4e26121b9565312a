"""A stand-in for the server behind the playground: answers by the book, and breaks on request.

It tests what a real server does not do at will: 2,000 tokens/s, a queue that is full, a
connection that breaks. What it answers depends on how the last message begins: see `answer`.
"""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import laneformer

FOLDER = Path(laneformer.__file__).parent / "serve/playground"
TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
PROPS = {
    "id": "stand-in", "isa": "none", "dtype": "bf16", "math": "exact", "kv_dtype": "fp16", "threads": 2, "chat": True,
    "weight_bytes": 269_000_000, "probe_bytes_per_s": 134.5e9, "limit_tokens_per_s": 500.0, "context_tokens": 4096,
    "sampling_defaults": {"temperature": 0.2, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1},
}  # fmt: skip


class StandIn(ThreadingHTTPServer):
    """requests: the bodies of chat completions; cancelled: how many of them the client left before the end."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reset()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def reset(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.cancelled = 0
        self.processor_share = 1.0
        self.link: dict[str, float] | None = None
        self.refusals = 0  # so many requests are answered with 429
        self.texts: dict[str, str] = {}  # answers by the message

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    server: StandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/props":
            props = {**PROPS, "processor_share": self.server.processor_share, "link": self.server.link}
            return self.send(200, json.dumps(props).encode(), "application/json")
        path = FOLDER / (self.path.removeprefix("/playground/") if self.path != "/" else "index.html")
        if not path.is_file():
            return self.fail(404, "no such file")
        self.send(200, path.read_bytes(), TYPES[path.suffix])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        if self.server.refusals:
            self.server.refusals -= 1
            return self.fail(429, "16 requests wait already; try again in a moment", **{"Retry-After": "2"})
        try:
            self.answer(body)
        except ConnectionError:
            self.server.cancelled += 1

    def answer(self, body: dict[str, Any]) -> None:
        """A stream. The last message: "FAST n" n tokens at 2,000/s; "SLOW" 10/s; "THINK" reasons; "BREAK" and
        the connection ends; "Hello ..." an echo at 20/s, which no slow browser reads in one piece; otherwise the
        text of `texts`, or an echo, at 800/s with speculation and 400/s without.
        """
        question = body["messages"][-1]["content"]
        word, _, rest = question.partition(" ")
        text = self.server.texts.get(question, f"You said: {question}")
        pieces = [text[i : i + 4] for i in range(0, len(text), 4)]
        rate, run = 800.0 if body.get("speculate", 31) else 400.0, 1
        if word == "FAST":
            pieces, rate, run = [f"w{i} " if i % 40 else "\n\n- item " for i in range(int(rest))], 2000.0, 4
        elif word == "SLOW":
            pieces, rate = ["slow "] * 1000, 10.0
        elif word == "Hello":
            rate = 20.0
        pieces = pieces[: body.get("max_completion_tokens", len(pieces))]
        self.head(200, {"Content-Type": "text/event-stream", "Connection": "close"})
        self.event({"role": "assistant", "content": ""}, None, 0)
        self.wfile.write(b": keep-alive\n\n")
        for thought in ("First <b>", "this</b>.") if word == "THINK" else ():
            self.event({"reasoning_content": thought}, None, 1)
        due_s = time.monotonic()
        for i in range(0, len(pieces), run):
            due_s = max(due_s + run / rate, time.monotonic() - 0.1)  # after a pause it does not catch up
            time.sleep(max(0.001, due_s - time.monotonic()))
            self.event({"content": "".join(pieces[i : i + run])}, None, min(len(pieces), i + run))
            if word == "BREAK" and i > 3:
                return self.connection.close()
        self.event({}, "stop", len(pieces))
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, delta: dict[str, str], finish: str | None, tokens: int) -> None:
        usage: dict[str, Any] = {"prompt_tokens": 240, "completion_tokens": tokens}
        usage["prompt_tokens_details"] = {"cached_tokens": 212}
        chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "usage": usage}
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

    def fail(self, status: int, message: str, **headers: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        self.send(status, json.dumps({"error": error}).encode(), "application/json", **headers)

    def send(self, status: int, content: bytes, kind: str, **headers: str) -> None:
        self.head(status, {"Content-Type": kind, "Content-Length": str(len(content)), **headers})
        self.wfile.write(content)

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Security-Policy": POLICY, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
