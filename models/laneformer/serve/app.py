"""The HTTP side of the server: its routes, its start and its end. `run` is all that a program needs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..engine.bench import probe
from ..engine.decoder import CUDA
from ..engine.options import checked_ids
from .options import ServerOptions
from .scheduler import Scheduler

try:
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import FileResponse, Response
    from fastapi.staticfiles import StaticFiles
    from prometheus_client import generate_latest
    from starlette.exceptions import HTTPException

    from .access import Access
    from .completions import CompletionAnswer
    from .context import ServingContext
    from .conversations import ConversationAnswer
    from .metrics import Metrics
    from .responses import STATUS, AnswerResponse, error_response
    from .schema import Body, CompletionRequest, ConversationRequest, RequestError, refusal
except ModuleNotFoundError as error:
    raise ValueError(f"the server needs the package {error.name}: pip install 'laneformer[serve]'") from None

if TYPE_CHECKING:
    from ..engine import Engine

UNANSWERED = 70  # status of the process where the device does not answer (EX_SOFTWARE)
UNANSWERED_S = 5.0  # until then /health says so
PLAYGROUND = Path(__file__).with_name("playground")
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
}


def create_app(engine: Engine, options: ServerOptions) -> FastAPI:
    """The application around an engine, which takes no other requests until the application has shut down."""
    names = (
        "isa",
        "dtype",
        "math",
        "kv_dtype",
        "threads",
        "weight_bytes",
    )
    facts = {"id": options.model, **{name: getattr(engine, name) for name in names}}
    # before requests come, so that nothing disturbs it
    facts["probe_bytes_per_s"] = None if engine.isa == CUDA else probe(engine)
    scheduler = Scheduler(engine, options.max_waiting, options.deadline_s)
    context = ServingContext(scheduler, engine, options.model, options.speculate)
    facts["sampling_defaults"] = context.sampling_defaults
    facts["max_joined"] = scheduler.max_joined
    facts |= {
        "context_tokens": context.context_tokens,
        "vocab_size": context.vocab_size,
        "version": __version__,
    }
    facts["chat"] = bool(engine.tokenizer_config.get("chat_template"))

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        scheduler.close()

    app = FastAPI(title="Laneformer", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.scheduler = scheduler
    metrics = Metrics(scheduler, facts)
    app.add_middleware(Access, options=options, metrics=metrics)
    add_error_handlers(app)
    add_api(app, context, options.keep_alive_s)
    add_facts(app, scheduler, facts, metrics)
    return app


def add_api(app: FastAPI, context: ServingContext, keep_alive_s: float) -> None:
    """OpenAI's routes, and llama.cpp's for tokens."""
    model = {"id": context.model, "object": "model", "created": int(time.time()), "owned_by": "laneformer"}

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest) -> Response:
        return AnswerResponse(CompletionAnswer(body, context), body.stream, keep_alive_s)

    @app.post("/v1/chat/completions")
    async def conversations(body: ConversationRequest) -> Response:
        return AnswerResponse(ConversationAnswer(body, context), body.stream, keep_alive_s)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        if name != context.model:
            message = f"the model {name!r} does not exist here; this server has {context.model!r}"
            raise RequestError(message, "model", "model_not_found", 404)
        return model

    @app.post("/tokenize")
    async def tokenize(body: Tokenize) -> dict[str, Any]:
        ids = context.prompts.text(body.content, body.add_special)
        return {"tokens": ids, "count": len(ids), "context_tokens": context.context_tokens}

    @app.post("/detokenize")
    async def detokenize(body: Detokenize) -> dict[str, Any]:
        try:
            ids = checked_ids(body.tokens, context.vocab_size, "tokens")
        except ValueError as error:
            raise RequestError(str(error), "tokens", "invalid_value") from None
        return {"content": context.tokenizer.decode(ids, skip_special_tokens=False)}


def add_facts(app: FastAPI, scheduler: Scheduler, facts: dict[str, Any], metrics: Metrics) -> None:
    """How the server is, and the playground, which shows it."""

    @app.get("/health")
    async def health(response: Response) -> dict[str, str]:
        status = "failed" if scheduler.failure else "stopping" if scheduler.stopping else "ok"
        response.status_code = 200 if status == "ok" else 503
        return {"status": status}

    @app.get("/props")
    async def props() -> dict[str, Any]:
        read = facts["probe_bytes_per_s"]
        return {**facts, "limit_tokens_per_s": read and read / facts["weight_bytes"]}

    @app.get("/metrics")
    async def metrics_text() -> Response:
        return Response(
            generate_latest(metrics.registry), media_type="text/plain; version=1.0.0; charset=utf-8"
        )

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PLAYGROUND / "index.html", headers=PAGE_HEADERS)

    app.mount("/playground", StaticFiles(directory=PLAYGROUND, check_dir=False))


class Tokenize(Body):
    content: str
    add_special: bool = False  # begin as the tokenizer begins every text


class Detokenize(Body):
    tokens: list[int]


def add_error_handlers(app: FastAPI) -> None:
    async def told(request: Request, error: Exception) -> Response:
        return error_response(error)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        found = refusal(error.errors())
        kind = request.headers.get("content-type", "")
        if found.code == "invalid_json" and not kind.startswith("application/json"):
            found = RequestError(
                f"the body has the content type {kind!r}; send application/json", None, "invalid_json"
            )
        return error_response(found)

    for kind_of_error in (HTTPException, RequestError, *STATUS, Exception):
        app.add_exception_handler(kind_of_error, told)
    app.add_exception_handler(RequestValidationError, invalid)


class Server(uvicorn.Server):
    """Uvicorn that says where it listens, and for which a signal is an orderly end."""

    def __init__(self, app: FastAPI, options: ServerOptions, on_start: Callable[[str], None] | None):
        config = uvicorn.Config(app, log_level="warning", server_header=False, proxy_headers=False)
        config.timeout_graceful_shutdown = (
            round(options.grace_s) + 5
        )  # the scheduler has cancelled the answers by then
        super().__init__(config)
        self.options, self.scheduler, self.on_start = options, app.state.scheduler, on_start
        self._last_s: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = (sockets or [])[0].getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        print(f"laneformer serves {self.options.model} at {address}", flush=True)
        if self.on_start is not None:
            self.on_start(address)

    async def on_tick(self, counter: int) -> bool:
        """Every 0.1 s: whether to end. Where the device does not answer, after as long as others need to see it."""
        if self.scheduler.unanswered and self._last_s is None:
            self._last_s = time.monotonic() + UNANSWERED_S
        late = self._last_s is not None and time.monotonic() > self._last_s
        return await super().on_tick(counter) or late

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stopping = asyncio.create_task(self.scheduler.stop(self.options.grace_s))
        await super().shutdown(sockets)  # closes the sockets, then waits for the answers
        stopping.cancel()

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Uvicorn's own would raise the signal again at the end, and the process end by it."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def run(engine: Engine, options: ServerOptions, on_start: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then let running requests end; ValueError where the port is in use.

    on_start: is told the address as soon as it can be called.
    """
    with options.listen() as listening:
        if options.host not in ("127.0.0.1", "localhost", "::1") and options.api_key is None:
            print(
                f"laneformer: WARNING: {options.host} without an API key: all who reach it may use it",
                file=sys.stderr,
            )
        app = create_app(engine, options)
        if engine.isa == CUDA:
            most = app.state.scheduler.max_joined
            decode = (
                f"up to {most} requests decode side by side" if most > 1 else "one request decodes at a time"
            )
            print(f"laneformer: {decode}, others wait", file=sys.stderr)
        Server(app, options, on_start).run(sockets=[listening])
        if app.state.scheduler.unanswered:  # the driver would wait for it at the end of the process
            print(
                "laneformer: the device does not answer; start the server again", file=sys.stderr, flush=True
            )
            os._exit(UNANSWERED)
