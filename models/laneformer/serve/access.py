"""Who may call the server, and with how much: checked before any route, for every request."""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .metrics import Metrics
from .options import ServerOptions
from .sending import error_response

OPEN, OPEN_FOLDER = ("/", "/health"), "/playground/"  # need no key: the page asks for it, a monitor has none
DISCARDED_BYTES = 64 * 2**20  # of a body that is too long: who is still sending would not see the answer
CLIENT_GONE = 499  # nginx's status for the log: nobody saw an answer


class Access:
    """Host, origin, key and body length of each request; counts its answer.

    A page of another site that a user's browser shows must not use the server: neither by its own name
    pointed at this address (DNS rebinding), so that names are checked, nor by a request across origins.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions, metrics: Metrics):
        self.app, self.options, self.metrics = app, options, metrics
        self.allowed = set(options.allowed_origins)
        self.names = {"localhost", options.host.lower(), *map(str.lower, options.host_names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        status = CLIENT_GONE

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if refused := self.refusal(scope):
                await error_response(refused, scope["path"])(scope, receive, counted)
            else:
                await self.app(scope, self.limited(receive), counted)
        except Exception:
            status = 500  # told by who catches it
            raise
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.answers.labels(route, status).inc()

    def refusal(self, scope: Scope) -> HTTPException | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        if not self.known(host):
            return HTTPException(
                403, f"the host {host!r} is not a name of this server; allow it with --host-names"
            )
        if origin is not None and urlsplit(origin).netloc != host and not self.allowed & {origin, "*"}:
            return HTTPException(
                403, f"pages of {origin!r} may not use this server; allow them with --allowed-origins"
            )
        key = self.options.api_key
        if key is not None and not (scope["path"] in OPEN or scope["path"].startswith(OPEN_FOLDER)):
            bearer, anthropic = headers.get(b"authorization", ""), headers.get(b"x-api-key", "")
            # some clients send both, one of them made up
            given = (bearer, f"Bearer {key}"), (anthropic, key)
            if not any(hmac.compare_digest(sent.encode(), right.encode()) for sent, right in given):
                return HTTPException(
                    401, "the API key is missing or wrong; send 'Authorization: Bearer KEY', or x-api-key"
                )
        return None

    def known(self, host: str) -> bool:
        """An address cannot be another site's; a name can."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in self.names or bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def limited(self, receive: Receive) -> Receive:
        """Raises for status 413 as soon as the body has more bytes than it may."""
        left = self.options.max_body_bytes

        async def limited() -> Message:
            nonlocal left
            message = await receive()
            if message["type"] == "http.request":
                left -= len(message.get("body", b""))
            if left >= 0:
                return message
            while message.get("more_body") and left > -DISCARDED_BYTES:
                message = await receive()
                left -= len(message.get("body", b""))
            most = self.options.max_body_bytes
            raise HTTPException(413, f"the body has more than {most} bytes", {"Connection": "close"})

        return limited
