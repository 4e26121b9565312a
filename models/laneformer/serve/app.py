"""The HTTP side of the server: its routes, its start and its end. Programs call `run`."""

# From a request to its tokens and back:
#
# 1. endpoints.py checks who asks and reads the body (bodies.py, schema.py, parts.py, fields.py).
# 2. apis/ translates it; conversation.py renders the prompt (tool_calls.py, grammar.py).
# 3. choices.py submits a request for each choice to scheduler.py, whose thread decodes it.
# 4. Tokens return as text (choices.py), as blocks (conversation.py) and in the words of an API
#    (apis/); sending.py writes them to the socket.

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from .. import __version__
from ..engine import Engine
from ..engine.bench import probe, slower_link
from ..engine.decoder import CUDA
from .options import ServerOptions

try:
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.middleware.cors import CORSMiddleware
    from fastapi.responses import FileResponse, Response
    from fastapi.staticfiles import StaticFiles
    from prometheus_client import generate_latest
    from starlette.exceptions import HTTPException

    from .apis import ollama
    from .apis.chat import ConversationAnswer
    from .apis.completions import CompletionAnswer
    from .apis.messages import MessagesAnswer, MessagesRequest, count_tokens
    from .apis.responses import ResponsesAnswer, ResponsesRequest
    from .bodies import Body, RequestError
    from .context import ServingContext
    from .endpoints import Access, Endpoints
    from .metrics import Metrics
    from .scheduler import Scheduler, ServingError
    from .schema import CompletionRequest, ConversationRequest
    from .sending import error_response
except ModuleNotFoundError as error:
    raise ValueError(
        f"the server needs the package {error.name}: pip install 'laneformer[serve]'"
    ) from None

# Longest time that a thread holds the GIL; Python's default of 5 ms adds up over several switches
SWITCH_S = 0.0005
UNANSWERED = 70  # exit status where the device does not answer (EX_SOFTWARE)
UNANSWERED_S = 5.0  # how long /health reports that before the process exits
ENGINE_FACTS = "isa", "dtype", "math", "kv_dtype", "threads", "weight_bytes"
PLAYGROUND = Path(__file__).with_name("playground")
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
}


def create_app(engine: Engine, options: ServerOptions) -> FastAPI:
    """Build the application of an engine, which serves nothing else until the application ends."""
    facts: dict[str, Any] = {"probe_bytes_per_s": None}

    def measure_bandwidth() -> None:
        if engine.isa != CUDA:
            facts["probe_bytes_per_s"] = max(facts["probe_bytes_per_s"] or 0.0, probe(engine))

    # Here no request disturbs it; the scheduler repeats it while idle, since other programs may
    # have disturbed the first one. The best value holds.
    measure_bandwidth()
    facts["link"] = slower_link(engine, options.link_us) if options.link_us else None
    scheduler = Scheduler(engine, options.max_waiting, options.deadline_s, measure_bandwidth)
    context = ServingContext(
        scheduler, engine, options.model_name, options.speculate, options.reasoning_budget
    )
    # Neither at startup, which it would delay by 0.2 s, nor while answers stream, which would stall
    scheduler.when_idle.append(context.grammars.prepare)
    facts |= {
        "id": options.model_name,
        "version": __version__,
        "chat": bool(engine.tokenizer_config.get("chat_template")),
        "sampling_defaults": context.conversation_defaults,
        "completion_defaults": context.completion_defaults,
        "draft_model": engine.draft_model and dataclasses.asdict(engine.draft_model),
        "draft_head": engine.draft_head and dataclasses.asdict(engine.draft_head),
        "max_joined": scheduler.max_joined,
        "context_tokens": context.context_tokens,
        "vocab_size": context.vocab_size,
        **{name: getattr(engine, name) for name in ENGINE_FACTS},
    }

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        # First what submits requests, then what runs them
        endpoints.close()
        scheduler.close()

    app = FastAPI(
        title="Laneformer", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.scheduler = scheduler
    metrics = Metrics(scheduler, facts)
    app.add_middleware(Access, options=options, metrics=metrics)
    if options.allowed_origins:
        # Outside of Access: a browser's preflight request carries no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    for kind_of_error in (HTTPException, RequestError, ServingError, Exception):
        app.add_exception_handler(kind_of_error, answer_error)
    endpoints = Endpoints(app, context, options)
    add_api(endpoints)
    ollama.add_routes(endpoints, facts)
    add_facts(app, scheduler, facts, metrics)
    return app


def add_api(endpoints: Endpoints) -> None:
    """Add OpenAI's and Anthropic's routes, and llama.cpp's for tokens."""
    app = endpoints.app
    context = endpoints.context
    model = {
        "id": context.model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "laneformer",
    }
    endpoints.add("/v1/completions", CompletionRequest, CompletionAnswer)
    endpoints.add("/v1/chat/completions", ConversationRequest, ConversationAnswer)
    endpoints.add("/v1/responses", ResponsesRequest, ResponsesAnswer)
    endpoints.add("/v1/messages", MessagesRequest, MessagesAnswer)
    endpoints.add("/v1/messages/count_tokens", MessagesRequest, count_tokens)
    endpoints.add("/tokenize", Tokenize, tokenize)
    endpoints.add("/detokenize", Detokenize, detokenize)

    @app.post("/v1/embeddings")
    @app.post("/api/embed")
    async def embeddings() -> None:
        raise RequestError(
            "embeddings are not supported: this model writes text; use a server of an embedding model",
            None,
            "unsupported_endpoint",
        )

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        if name != context.model:
            message = f"the model {name!r} does not exist here; this server has {context.model!r}"
            raise RequestError(message, "model", "model_not_found", 404)
        return model


def add_facts(app: FastAPI, scheduler: Scheduler, facts: dict[str, Any], metrics: Metrics) -> None:
    """Add the routes that describe the server, and the playground, which shows them."""

    @app.get("/health")
    async def health(response: Response) -> dict[str, str]:
        status = "stopping" if scheduler.stopping else "ok"
        if scheduler.failure is not None:
            status = "failed"
        response.status_code = 200 if status == "ok" else 503
        return {"status": status}

    @app.get("/props")
    async def props() -> dict[str, Any]:
        engine = scheduler.engine
        bytes_per_s = facts["probe_bytes_per_s"]
        drafts = facts["draft_model"]
        return {
            **facts,
            **engine.kv_cache,
            "draft_model": drafts and {**drafts, "kv_bytes": engine.draft_kv_bytes},
            "limit_tokens_per_s": bytes_per_s and bytes_per_s / facts["weight_bytes"],
            "saved_prefixes": engine.saved_prefixes or None,
            "processor_share": scheduler.totals.processor_share,
        }

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
    add_special: bool = False  # put the tokenizer's begin-of-text id in front


def tokenize(body: Tokenize, context: ServingContext) -> dict[str, Any]:
    ids = context.prompt_encoder.encode_text(
        context.check_length(body.content, "content"), body.add_special
    )
    return {"tokens": ids, "count": len(ids), "context_tokens": context.context_tokens}


class Detokenize(Body):
    tokens: list[int]


def detokenize(body: Detokenize, context: ServingContext) -> dict[str, Any]:
    ids = context.check_ids(body.tokens, "tokens", "tokens")
    return {"content": context.tokenizer.decode(ids, skip_special_tokens=False)}


async def answer_error(request: Request, error: Exception) -> Response:
    return error_response(error, request.url.path)


class Server(uvicorn.Server):
    """Uvicorn that prints its address, and treats a signal as an orderly shutdown."""

    def __init__(
        self, app: FastAPI, options: ServerOptions, on_start: Callable[[str], None] | None
    ):
        config = uvicorn.Config(app, log_level="warning", server_header=False, proxy_headers=False)
        # By then the scheduler has cancelled all answers
        config.timeout_graceful_shutdown = round(options.grace_s) + 5
        super().__init__(config)
        self.options = options
        self.scheduler = app.state.scheduler
        self.on_start = on_start
        self._last_s: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = (sockets or [])[0].getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        # Programs that start a server read this line from stdout
        print(f"laneformer serves {self.options.model_name} at {address}", flush=True)
        key = ' -H "Authorization: Bearer $KEY"' if self.options.api_key else ""
        body = """'{"messages": [{"role": "user", "content": "Hello"}]}'"""
        json = "-H 'Content-Type: application/json'"
        print(f"  try: curl {address}/v1/chat/completions{key} {json} -d {body}", file=sys.stderr)
        if self.on_start is not None:
            self.on_start(address)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to exit; Uvicorn calls this every 0.1 s."""
        # A monitor has to see the failure in /health before the process exits
        if self.scheduler.has_hung and self._last_s is None:
            self._last_s = time.monotonic() + UNANSWERED_S
        is_overdue = self._last_s is not None and time.monotonic() > self._last_s
        return await super().on_tick(counter) or is_overdue

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Running answers get grace_s to end; Uvicorn waits for them below
        stopping = asyncio.create_task(self.scheduler.stop(self.options.grace_s))
        # Closes the sockets, then waits for the answers
        await super().shutdown(sockets)
        stopping.cancel()

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Shut down at the first signal; a second Ctrl-C exits at once."""
        # Uvicorn's own handler raises the signal again at the end, which would set the exit
        # status
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def run(
    engine: Engine,
    options: ServerOptions,
    on_start: Callable[[str], None] | None = None,
    listening: socket.socket | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then let running requests end.

    Args:
        on_start: called with the address as soon as requests are accepted.
        listening: the socket, if the caller has opened it.

    Raises:
        ValueError: the port is in use.
    """
    with listening or options.listen() as listening:
        app = create_app(engine, options)
        if engine.isa == CUDA:
            max_joined = app.state.scheduler.max_joined
            side_by_side = f"up to {max_joined} requests decode side by side"
            decode = side_by_side if max_joined > 1 else "one request decodes at a time"
            print(f"laneformer: {decode}, others wait", file=sys.stderr)
        sys.setswitchinterval(SWITCH_S)
        # Exclude objects that live as long as the server from garbage collection
        gc.collect()
        gc.freeze()
        Server(app, options, on_start).run(sockets=[listening])
        # Frozen objects would be reported as leaks of the extension module at exit
        gc.unfreeze()
        if app.state.scheduler.has_hung:
            # An ordinary exit would wait for the driver, and the driver for the device
            print(
                "laneformer: the device does not answer; start the server again",
                file=sys.stderr,
                flush=True,
            )
            os._exit(UNANSWERED)
