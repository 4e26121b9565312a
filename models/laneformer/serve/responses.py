"""Responses: an answer as JSON or as a stream of events, ended when its reader is gone;
errors in OpenAI's form.
"""

from __future__ import annotations

import asyncio
import contextlib
import json

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from .completions import CompletionAnswer
from .conversations import ConversationAnswer
from .scheduler import Busy, DeadlineExceeded, EngineError, Stopping
from .schema import RequestError

STATUS: dict[type[Exception], int] = {Busy: 429, Stopping: 503, DeadlineExceeded: 503, EngineError: 500}
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
CODES = {401: "invalid_api_key", 429: "queue_full"}
STALLED_S = 30.0  # a reader that has not read for so long is gone
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
DONE = b"data: [DONE]\n\n"


def error_body(error: Exception) -> tuple[int, bytes]:
    """Status and OpenAI's form. What nobody foresaw is in the log alone."""
    status = STATUS.get(type(error), getattr(error, "status", getattr(error, "status_code", 500)))
    known = isinstance(error, (HTTPException, RequestError, *STATUS))
    found = {
        "message": getattr(error, "detail", str(error))
        if known
        else "the server has failed; its log says why",
        "type": TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error"),
        "param": getattr(error, "param", None),
        "code": getattr(error, "code", None) or CODES.get(status),
    }
    return status, json.dumps({"error": found}).encode()  # ASCII: a message may quote half a surrogate pair


def error_response(error: Exception) -> Response:
    headers = (
        {"Retry-After": str(error.retry_after_s)}
        if isinstance(error, Busy)
        else getattr(error, "headers", None)
    )
    status, body = error_body(error)
    return Response(body, status, headers, "application/json")


class AnswerResponse(Response):
    """Sends an answer while it watches whether the client is still there; cancels the answer when it is not.

    A stream begins with its first chunk or first comment; what goes wrong before has a status of
    its own, later it is an event. While nothing comes, a comment every `keep_alive_s` keeps proxies
    from closing the connection.
    """

    def __init__(self, answer: CompletionAnswer | ConversationAnswer, stream: bool, keep_alive_s: float):
        self.status_code, self.background = 200, None
        self._answer, self._streamed, self._keep_alive_s = answer, stream, keep_alive_s
        self._writing = asyncio.Lock()
        self._writes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(disconnected(receive))
        work = asyncio.create_task(
            self._stream(send) if self._streamed else self._whole(scope, receive, send)
        )
        if self._streamed:
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
        await JSONResponse(await self._answer.whole())(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        self._send = send
        end = DONE
        try:
            async for chunk in self._answer:
                await self._write(b"data: %b\n\n" % chunk.encode())
        except Exception as error:
            if not self._writes:
                raise
            end = b"data: %b\n\n" % error_body(error)[1] + DONE
        finally:
            async with self._writing:  # not in the middle of a comment
                self._keeping.cancel()
        await self._write(end, more=False)

    async def _write(self, body: bytes, more: bool = True) -> None:
        async with self._writing:
            if not self._writes:
                await self._send({"type": "http.response.start", "status": 200, "headers": EVENTS})
            self._writes += 1
            await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def _keep_alive(self, work: asyncio.Task[None]) -> None:
        with contextlib.suppress(TimeoutError):  # of a write that the client holds up, this one or another
            while True:
                before = self._writes
                await asyncio.sleep(self._keep_alive_s)
                if self._writes == before:
                    async with asyncio.timeout(STALLED_S):
                        await self._write(b": keep-alive\n\n")
        work.cancel()


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
