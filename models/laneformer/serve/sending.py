"""Writes answers to the socket, as JSON or as events, and errors in the form of each API."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from .bodies import RequestError
from .choices import Choices
from .scheduler import Busy, ServingError

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
CODES = {401: "invalid_api_key", 429: "queue_full"}
STALLED_S = 30.0  # after that a client that reads nothing counts as gone


class ClientError(NamedTuple):
    """An error as clients see it; the fields are OpenAI's."""

    status: int
    message: str
    type: str
    param: str | None
    code: str | None

    @classmethod
    def from_error(cls, error: Exception) -> ClientError:
        status = getattr(error, "status_code", 500)
        message = getattr(error, "detail", str(error))
        if not isinstance(error, (HTTPException, RequestError, ServingError)):
            # An unexpected error may quote private data, so its message goes to the log only
            message = "the server has failed; its log says why"
        kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        code = getattr(error, "code", None) or CODES.get(status)
        return cls(status, message, kind, getattr(error, "param", None), code)

    def format_body(self, path: str = "") -> dict[str, Any]:
        if path.startswith("/v1/messages"):
            kind = {"server_error": "api_error"}.get(self.type, self.type)
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        if path.startswith("/api/"):
            return {"error": self.message}
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def error_response(error: Exception, path: str) -> Response:
    headers = getattr(error, "headers", None)
    if isinstance(error, Busy):
        headers = {"Retry-After": str(error.retry_after_s)}
    answer = ClientError.from_error(error)
    # json.dumps writes ASCII: a message may quote half a surrogate pair, which UTF-8 cannot encode
    return Response(
        json.dumps(answer.format_body(path)), answer.status, headers, "application/json"
    )


class Answer:
    """An answer of `choices`, which must have begun: iterate over its events, or await `whole`."""

    choices: Choices
    streamed = False
    media = "text/event-stream; charset=utf-8"
    silence = ": keep-alive\n\n"  # a comment, which readers of a stream skip

    async def whole(self) -> dict[str, Any]:
        raise NotImplementedError

    def __aiter__(self) -> AsyncIterator[str]:
        raise NotImplementedError

    def write_failure(self, error: ClientError) -> str:
        """Return the last events of a stream that an error has ended."""
        raise NotImplementedError


class AnswerResponse(Response):
    """Sends an answer, and cancels it when the client is gone."""

    def __init__(self, answer: Answer, keep_alive_s: float, headers: dict[str, str]):
        self.status_code = 200
        self.background = None
        self._more_headers = headers
        self._answer = answer
        self._keep_alive_s = keep_alive_s
        self._writing = asyncio.Lock()
        self._writes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Whichever ends first: the answer, or the connection
        disconnect = asyncio.create_task(wait_for_disconnect(receive))
        work = asyncio.create_task(
            self._send_stream(send)
            if self._answer.streamed
            else self._send_whole(scope, receive, send)
        )
        if self._answer.streamed:
            self._keeping = asyncio.create_task(self._keep_alive(work))
        try:
            await asyncio.wait({work, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._answer.choices.cancel()
            disconnect.cancel()
            work.cancel()
            await asyncio.gather(work, disconnect, return_exceptions=True)
        if not work.cancelled():
            work.result()

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        whole = JSONResponse(await self._answer.whole(), headers=self._more_headers)
        await whole(scope, receive, send)

    async def _send_stream(self, send: Send) -> None:
        self._send = send
        end = ""
        try:
            async for events in self._answer:
                if events:
                    await self._send_text(events)
        except Exception as error:
            # Before the first chunk an error still has a status of its own; later it is an event
            if not self._writes:
                raise
            end = self._answer.write_failure(ClientError.from_error(error))
        finally:
            # Take the lock so that a comment is not interrupted
            async with self._writing:
                self._keeping.cancel()
        await self._send_text(end, more=False)

    async def _send_text(self, text: str, more: bool = True) -> None:
        async with self._writing:
            if not self._writes:
                headers = {
                    "content-type": self._answer.media,
                    "cache-control": "no-cache",
                    **self._more_headers,
                }
                raw = [(name.encode(), value.encode()) for name, value in headers.items()]
                await self._send({"type": "http.response.start", "status": 200, "headers": raw})
            # Comments count too: the first one has sent the status
            self._writes += 1
            await self._send(
                {"type": "http.response.body", "body": text.encode(), "more_body": more}
            )

    async def _keep_alive(self, work: asyncio.Task[None]) -> None:
        # A comment in every silence keeps proxies from closing the connection. The timeout is that
        # of a write which the client holds up, this one or another.
        with contextlib.suppress(TimeoutError):
            while True:
                # Send a comment only if nothing else was sent meanwhile
                writes_before = self._writes
                await asyncio.sleep(self._keep_alive_s)
                if self._writes == writes_before:
                    async with asyncio.timeout(STALLED_S):
                        await self._send_text(self._answer.silence)
        work.cancel()


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
