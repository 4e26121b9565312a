"""Endpoints that take a body: it is read, and what it asks for is prepared, apart from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic.json_schema import models_json_schema

from .bodies import Body, Reading, RequestError
from .context import ServingContext
from .options import ServerOptions
from .scheduler import Busy
from .sending import Answer, AnswerResponse

THREADS = 2  # that prepare answers: a long prompt does not hold up all others
REFERENCES = "#/components/schemas/{model}"

Asked = TypeVar("Asked", bound=Body)


class Endpoints:
    """Adds endpoints to an application, and describes their bodies in its OpenAPI."""

    def __init__(self, app: FastAPI, context: ServingContext, options: ServerOptions):
        self.app, self.context, self.options = app, context, options
        self._pool = ThreadPoolExecutor(THREADS, "laneformer-prepare")
        self._preparing = 0
        self._bodies: list[type[Body]] = []
        self._describe = app.openapi
        app.openapi = self._described  # type: ignore[method-assign]

    def close(self) -> None:
        self._pool.shutdown()

    def add(
        self,
        path: str,
        body: type[Asked],
        make: Callable[[Asked, ServingContext], Answer | dict[str, Any]],
        any_type: bool = False,
    ) -> None:
        """A path for POST. make: an answer, which is then begun, or the whole of it; called in a thread of its
        own. any_type: of content, beside application/json.
        """

        async def endpoint(request: Request) -> Response:
            raw, reading = await request.body(), Reading(self.options.strict, self.context.max_values)
            if not any_type:
                check_type(request.headers.get("content-type", "application/json"))
            found = await self._apart(lambda: make(body.read(raw, reading), self.context))
            if not isinstance(found, Answer):
                return JSONResponse(found, headers=reading.headers)
            found.begin()
            return AnswerResponse(found, self.options.keep_alive_s, reading.headers)

        self._bodies.append(body)
        schema = {"$ref": REFERENCES.format(model=body.__name__)}
        told = {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}
        self.app.add_api_route(path, endpoint, methods=["POST"], openapi_extra=told, name=path)

    async def _apart(self, work: Callable[[], Any]) -> Any:
        """Busy where more is prepared than may wait and run."""
        scheduler = self.context.scheduler
        if self._preparing >= scheduler.max_waiting + scheduler.max_joined:
            raise Busy(scheduler.max_waiting, 1)
        self._preparing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._preparing -= 1

    def _described(self) -> dict[str, Any]:
        described = self._describe()
        _, schemas = models_json_schema(
            [(body, "validation") for body in self._bodies], ref_template=REFERENCES
        )
        described.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        return described


def check_type(kind: str) -> None:
    if kind.partition(";")[0].strip().lower() != "application/json":
        message = f"the body has the content type {kind[:80]!r}; send application/json"
        raise RequestError(message, None, "invalid_json")
