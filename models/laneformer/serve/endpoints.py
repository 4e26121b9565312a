"""Access control, and the reading of bodies, which are prepared outside of the event loop."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .bodies import Body, Reading, RequestError, translate_field
from .context import ServingContext
from .metrics import Metrics
from .options import ServerOptions
from .scheduler import Busy
from .sending import Answer, AnswerResponse, error_response

# Paths that need no key: the page asks for it, a monitor has none
OPEN_PATHS = "/", "/health"
OPEN_FOLDER = "/playground/"
# Bytes to read of a body that is too long: a client that is still sending reads no answer
DISCARDED_BYTES = 64 * 2**20
CLIENT_GONE = 499  # nginx's status where nobody saw an answer
THREADS = 2  # prepare answers: a long prompt does not hold up all others
REFERENCES = "#/components/schemas/{model}"

BodyType = TypeVar("BodyType", bound=Body)


class Access:
    """Checks host, origin, key and length of each request; serves HEAD as GET."""

    def __init__(self, app: ASGIApp, options: ServerOptions, metrics: Metrics):
        self.app = app
        self.options = options
        self.metrics = metrics
        self.allowed = set(options.allowed_origins)
        self.names = {"localhost", options.host.lower(), *map(str.lower, options.host_names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        # HEAD is handled as GET, without sending the body
        status = CLIENT_GONE
        is_head = scope["method"] == "HEAD"
        scope = {**scope, "method": "GET"} if is_head else scope

        async def count_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        try:
            if refusal := self.find_refusal(scope):
                await error_response(refusal, scope["path"])(scope, receive, count_status)
            else:
                await self.app(scope, self.limit_body(receive), count_status)
        except Exception:
            status = 500  # whoever catches it answers
            raise
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.answers.labels(route, status).inc()

    def find_refusal(self, scope: Scope) -> HTTPException | None:
        # A page of another site in a user's browser must not reach the server, neither through a
        # name of its own that resolves to this address (DNS rebinding) nor across origins
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        origin = headers.get(b"origin")
        if not self.is_allowed_host(host):
            return HTTPException(
                403, f"the host {host!r} is not a name of this server; allow it with --host-names"
            )
        if (
            origin is not None
            and urlsplit(origin).netloc != host
            and not self.allowed & {origin, "*"}
        ):
            return HTTPException(
                403,
                f"pages of {origin!r} may not use this server; allow them with --allowed-origins",
            )
        key = self.options.api_key
        if key is not None and not (
            scope["path"] in OPEN_PATHS or scope["path"].startswith(OPEN_FOLDER)
        ):
            bearer = headers.get(b"authorization", "")
            anthropic = headers.get(b"x-api-key", "")
            # Some clients send both headers, one of them with a placeholder
            pairs = (bearer, f"Bearer {key}"), (anthropic, key)
            if not any(
                hmac.compare_digest(header.encode(), right.encode()) for header, right in pairs
            ):
                return HTTPException(
                    401,
                    "the API key is missing or wrong; send 'Authorization: Bearer KEY', or x-api-key",
                )
        return None

    def is_allowed_host(self, host: str) -> bool:
        """Return whether a Host header is an address, or a name that was allowed."""
        try:
            # Unlike a name, an address cannot belong to another site
            name = urlsplit(f"//{host}").hostname or ""
            return name in self.names or bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def limit_body(self, receive: Receive) -> Receive:
        """Raise status 413 as soon as the body exceeds max_body_bytes."""
        remaining_bytes = max_bytes = self.options.max_body_bytes

        async def receive_limited() -> Message:
            nonlocal remaining_bytes
            message = await receive()
            if message["type"] == "http.request":
                remaining_bytes -= len(message.get("body", b""))
            if remaining_bytes >= 0:
                return message
            # Read on for a while: most clients read the answer only when they have sent
            # everything
            while message.get("more_body") and remaining_bytes > -DISCARDED_BYTES:
                message = await receive()
                remaining_bytes -= len(message.get("body", b""))
            raise HTTPException(
                413, f"the body has more than {max_bytes} bytes", {"Connection": "close"}
            )

        return receive_limited


class Endpoints:
    """Adds endpoints to an application, and their bodies to its OpenAPI description."""

    def __init__(self, app: FastAPI, context: ServingContext, options: ServerOptions):
        self.app = app
        self.context = context
        self.options = options
        self._pool = ThreadPoolExecutor(THREADS, "laneformer-prepare")
        self._preparing = 0
        self._bodies: list[type[Body]] = []
        self._describe = app.openapi
        app.openapi = self._describe_api  # type: ignore[method-assign]

    def close(self) -> None:
        self._pool.shutdown()

    def add(
        self,
        path: str,
        body: type[BodyType],
        make: Callable[[BodyType, ServingContext], Answer | dict[str, Any]],
        any_type: bool = False,  # of content, as curl -d and Ollama's clients send it
    ) -> None:
        """Add a path for POST, whose answer `make` prepares in another thread."""

        async def endpoint(request: Request) -> Response:
            raw = await request.body()
            reading = Reading(self.options.strict, self.context.max_values)
            kind = request.headers.get("content-type", "application/json")
            if not any_type and kind.partition(";")[0].strip().lower() != "application/json":
                message = f"the body has the content type {kind[:80]!r}; send application/json"
                raise RequestError(message, None, "invalid_json")

            def prepare_answer() -> Answer | dict[str, Any]:
                parsed_body = body.read(raw, reading)
                try:
                    answer = make(parsed_body, self.context)
                except RequestError as error:
                    raise error.translate(parsed_body.api_names) from None
                if isinstance(answer, Answer):
                    answer.choices.load_prefixes()
                    for name in answer.choices.unused:
                        reading.unused[translate_field(name, parsed_body.api_names)] = None
                return answer

            answer = await self._run_in_pool(prepare_answer)
            if not isinstance(answer, Answer):
                return JSONResponse(answer, headers=reading.headers)
            # On the event loop, like all calls of the scheduler
            answer.choices.begin()
            return AnswerResponse(answer, self.options.keep_alive_s, reading.headers)

        self._bodies.append(body)
        schema = {"$ref": REFERENCES.format(model=body.__name__)}
        description = {
            "requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}
        }
        self.app.add_api_route(
            path, endpoint, methods=["POST"], openapi_extra=description, name=path
        )

    async def _run_in_pool(self, work: Callable[[], Any]) -> Any:
        """Run work in another thread; Busy where more of it waits than requests may."""
        scheduler = self.context.scheduler
        # A request that is being prepared counts like one that waits
        if self._preparing >= scheduler.max_waiting + scheduler.max_joined:
            raise Busy(scheduler.max_waiting, 1)
        self._preparing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._preparing -= 1

    def _describe_api(self) -> dict[str, Any]:
        # FastAPI does not describe bodies that it does not parse itself
        description = self._describe()
        _, schemas = models_json_schema(
            [(body, "validation") for body in self._bodies], ref_template=REFERENCES
        )
        description.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        return description
