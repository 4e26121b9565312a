"""Answers on their way: as JSON or as a stream of events, ended when their reader is gone; errors in the form
of each API.
"""

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
STALLED_S = 30.0  # a reader that has not read for so long is gone


class ClientError(NamedTuple):
    """What a client is told about an error; the fields are OpenAI's."""

    status: int
    message: str
    type: str
    param: str | None
    code: str | None

    @classmethod
    def of(cls, error: Exception) -> ClientError:
        """What nobody foresaw is in the log alone."""
        status = getattr(error, "status_code", 500)
        known = isinstance(error, (HTTPException, RequestError, ServingError))
        message = (
            getattr(error, "detail", str(error))
            if known
            else "the server has failed; its log says why"
        )
        kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        code = getattr(error, "code", None) or CODES.get(status)
        return cls(status, message, kind, getattr(error, "param", None), code)

    def body(self, path: str = "") -> dict[str, Any]:
        """In the form of the API that has this path."""
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
    answer = ClientError.of(error)
    # ASCII: a message may quote half a surrogate pair
    return Response(json.dumps(answer.body(path)), answer.status, headers, "application/json")


class Answer:
    """An answer under way: `begin` it; then iterate for the text of its events, or await `whole`;
    at any time `cancel` it.
    """

    choices: Choices
    streamed = False
    media = "text/event-stream; charset=utf-8"
    silence = ": keep-alive\n\n"  # what readers of a stream skip

    def begin(self) -> None:
        """On the event loop; what `Scheduler.submit` raises."""
        self.choices.begin()

    def cancel(self) -> None:
        self.choices.cancel()

    async def whole(self) -> dict[str, Any]:
        raise NotImplementedError

    def __aiter__(self) -> AsyncIterator[str]:
        raise NotImplementedError

    def failure_events(self, error: ClientError) -> str:
        """The last events of a stream that an error has ended."""
        raise NotImplementedError


class AnswerResponse(Response):
    """Sends an answer while it watches whether the client is still there; cancels the answer when it is not.

    A stream begins with its first chunk or first comment; what goes wrong before has a status of
    its own, later it is an event. While nothing comes, a comment every `keep_alive_s` keeps proxies
    from closing the connection.
    """

    def __init__(self, answer: Answer, keep_alive_s: float, headers: dict[str, str]):
        self.status_code, self.background, self._more_headers = 200, None, headers
        self._answer, self._keep_alive_s = answer, keep_alive_s
        self._writing = asyncio.Lock()
        self._writes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(wait_for_disconnect(receive))
        work = asyncio.create_task(
            self._stream(send) if self._answer.streamed else self._whole(scope, receive, send)
        )
        if self._answer.streamed:
            self._keeping = asyncio.create_task(self._keep_alive(work))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._answer.cancel()
            gone.cancel()
            work.cancel()  # nothing where it is done
            await asyncio.gather(work, gone, return_exceptions=True)
        if not work.cancelled():
            work.result()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        whole = JSONResponse(await self._answer.whole(), headers=self._more_headers)
        await whole(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        self._send = send
        end = ""
        try:
            async for events in self._answer:
                if events:
                    await self._write(events)
        except Exception as error:
            if not self._writes:
                raise
            end = self._answer.failure_events(ClientError.of(error))
        finally:
            async with self._writing:  # not in the middle of a comment
                self._keeping.cancel()
        await self._write(end, more=False)

    async def _write(self, text: str, more: bool = True) -> None:
        async with self._writing:
            if not self._writes:
                headers = {
                    "content-type": self._answer.media,
                    "cache-control": "no-cache",
                    **self._more_headers,
                }
                raw = [(name.encode(), value.encode()) for name, value in headers.items()]
                await self._send({"type": "http.response.start", "status": 200, "headers": raw})
            self._writes += 1
            await self._send(
                {"type": "http.response.body", "body": text.encode(), "more_body": more}
            )

    async def _keep_alive(self, work: asyncio.Task[None]) -> None:
        with contextlib.suppress(
            TimeoutError
        ):  # of a write that the client holds up, this one or another
            while True:
                before = self._writes
                await asyncio.sleep(self._keep_alive_s)
                if self._writes == before:
                    async with asyncio.timeout(STALLED_S):
                        await self._write(self._answer.silence)
        work.cancel()


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
