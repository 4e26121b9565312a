"""The HTTP side of the server: routes, who may call them, streams, errors in OpenAI's form, start and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from .. import __version__
from .options import ServerOptions
from .scheduler import Scheduler

try:
    import uvicorn
    from fastapi import FastAPI, HTTPException
    from fastapi.responses import JSONResponse, Response
except ModuleNotFoundError as error:
    raise ValueError(f"the server needs the package {error.name}: pip install 'laneformer[serve]'") from None

if TYPE_CHECKING:
    from ..engine import Engine

log = logging.getLogger("laneformer.serve")


def create_app(engine: Engine, options: ServerOptions) -> FastAPI:
    """The application around an engine, which takes no other requests until the application has shut down."""
    scheduler = Scheduler(engine, options.max_waiting, options.deadline_s)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        scheduler.close()

    app = FastAPI(title="Laneformer", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.scheduler = scheduler
    created = int(time.time())

    def model() -> dict[str, Any]:
        return {"id": options.model, "object": "model", "created": created, "owned_by": "laneformer"}

    @app.get("/health")
    async def health() -> Response:
        status = "failed" if scheduler.failure else "stopping" if scheduler.stopping else "ok"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        if name != options.model:
            raise HTTPException(404, f"the model {name!r} does not exist here; this server has {options.model!r}")
        return model()

    return app


class Server(uvicorn.Server):
    """Uvicorn that says where it listens, and for which a signal is an orderly end."""

    def __init__(self, app: FastAPI, options: ServerOptions, on_start: Callable[[str], None] | None):
        grace_s = round(options.grace_s) + 5  # the scheduler's comes first
        super().__init__(
            uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=grace_s, server_header=False)
        )
        self.options, self.scheduler, self.on_start = options, app.state.scheduler, on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = (sockets or [])[0].getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        print(f"laneformer serves {self.options.model} at {address}", flush=True)
        if self.on_start is not None:
            self.on_start(address)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stopping = asyncio.create_task(self.scheduler.stop(self.options.grace_s))
        await super().shutdown(sockets)  # stops to accept, and waits for what is open
        stopping.cancel()

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Uvicorn's own would raise the signal again at the end, so that the process never ended with status 0."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def run(engine: Engine, options: ServerOptions, on_start: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then let running requests end; ValueError where the port is in use.

    on_start: is told the address as soon as it can be called.
    """
    with options.listen() as listening:
        if options.host not in ("127.0.0.1", "localhost", "::1") and options.api_key is None:
            print("laneformer: WARNING: everybody in this network may use this server; set an API key", file=sys.stderr)
        Server(create_app(engine, options), options, on_start).run(sockets=[listening])
