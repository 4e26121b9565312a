"""A stand-in for the playground's server: answers by the protocol, and breaks on request.

It does what a real server does not do at will: 2,000 tokens/s, a full queue, a broken connection.
The beginning of the last message selects its answer; see `StandIn.events`.
"""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

import laneformer

FOLDER = Path(laneformer.__file__).parent / "serve/playground"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
PROPS = {
    "id": "stand-in",
    "isa": "none",
    "dtype": "bf16",
    "math": "exact",
    "kv_dtype": "fp16",
    "threads": 2,
    "chat": True,
    "weight_bytes": 269_000_000,
    "probe_bytes_per_s": 134.5e9,
    "limit_tokens_per_s": 500.0,
    "context_tokens": 4096,
    "sampling_defaults": {"temperature": 0.2, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1},
}


class StandIn:
    """A stand-in server.

    `requests` holds the bodies of chat completions; `cancelled` counts those that the client left early.
    """

    def __init__(self):
        self.reset()
        routes = [
            Route("/", self.page),
            Route("/props", self.props),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Mount("/playground", StaticFiles(directory=FOLDER)),
        ]
        # open before the thread runs, so that nobody waits for it
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.socket.getsockname()[1]}/"
        self.server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="critical"))
        self.thread = threading.Thread(target=self.server.run, args=[[self.socket]], daemon=True)
        self.thread.start()

    def close(self):
        self.server.should_exit = self.server.force_exit = True
        self.thread.join()

    def reset(self):
        self.requests = []
        self.cancelled = 0
        self.processor_share = 1.0
        self.accepted_tokens = 0  # of drafts, in each answer
        self.link = None
        self.refusals = 0  # so many requests are answered with 429
        self.texts = {}  # answers by the message
        self.break_now = threading.Event()

    async def page(self, request: Request) -> Response:
        return FileResponse(FOLDER / "index.html", headers={"Content-Security-Policy": POLICY})

    async def props(self, request: Request) -> Response:
        return JSONResponse({**PROPS, "processor_share": self.processor_share, "link": self.link})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        if self.refusals:
            self.refusals -= 1
            error = {"message": "16 requests wait already; try again in a moment"}
            return JSONResponse({"error": error}, 429, {"Retry-After": "2"})
        return StreamingResponse(self.events(body), media_type="text/event-stream")

    async def events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        """Yield a stream that the last message selects.

        "FAST n" gives n tokens at 2,000/s, "SLOW" 10/s, "THINK" reasoning; "BREAK" breaks the connection
        once break_now is set; "Hello ..." gives an echo at 20/s, which no slow browser reads in one piece.
        All else gives the text of `texts`, or an echo, at 800/s with speculation and 400/s without.
        """
        question = body["messages"][-1]["content"]
        word, _, rest = question.partition(" ")
        text = self.texts.get(question, f"You said: {question}")
        pieces = [text[i : i + 4] for i in range(0, len(text), 4)]
        rate = 800.0 if body.get("speculate", 31) else 400.0
        run = 1
        if word == "FAST":
            pieces = [f"w{i} " if i % 40 else "\n\n- item " for i in range(int(rest))]
            rate = 2000.0
            run = 4
        elif word == "SLOW":
            pieces = ["slow "] * 1000
            rate = 10.0
        elif word == "Hello":
            rate = 20.0
        pieces = pieces[: body.get("max_completion_tokens", len(pieces))]
        yield event({"role": "assistant", "content": ""}, 0) + ": keep-alive\n\n"
        for thought in ("First <b>", "this</b>.") if word == "THINK" else ():
            yield event({"reasoning_content": thought}, 1)
        due_s = time.monotonic()
        try:
            for i in range(0, len(pieces), run):
                # after a pause it does not catch up
                due_s = max(due_s + run / rate, time.monotonic() - 0.1)
                await asyncio.sleep(max(0.001, due_s - time.monotonic()))
                yield event({"content": "".join(pieces[i : i + run])}, min(len(pieces), i + run))
                if word == "BREAK" and i > 3:
                    # A browser discards what it has not read when a connection breaks
                    while not self.break_now.is_set():
                        await asyncio.sleep(0.005)
                    raise ConnectionError
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        yield event({}, len(pieces), "stop", self.accepted_tokens) + "data: [DONE]\n\n"


def event(delta: dict[str, str], tokens: int, finish: str | None = None, accepted: int = 0) -> str:
    usage = {
        "prompt_tokens": 240,
        "completion_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": 212},
        "completion_tokens_details": {"accepted_prediction_tokens": accepted},
    }
    chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "usage": usage}
    return f"data: {json.dumps(chunk)}\n\n"
