"""What the APIs have in common that tell an answer in blocks: one choice of one conversation."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from pydantic import ValidationInfo

from ..bodies import SHOWN_CHARS, STRICTLY, Reading, RequestError, refuse
from ..context import ServingContext
from ..conversation import Block, Blocks, Conversation
from ..schema import ConversationRequest
from ..sending import Answer
from .openai import usage


class Translated(Protocol):
    """A body of an API; fields: of the same ConversationRequest."""

    stream: bool

    def fields(self) -> dict[str, Any]: ...


class BlockAnswer(Answer):
    """finish_reason, stop: OpenAI's reason and the stop string, once it has ended."""

    def __init__(self, request: Translated, context: ServingContext):
        self.context, self.streamed = context, request.stream
        self.conversation = Conversation(conversation_of(request), context)
        self.blocks = Blocks()
        self.finish_reason: str | None = None
        self.stop: str | None = None
        self.begun_s = self.first_s = 0.0  # when it was submitted, and when it first said something

    def begin(self) -> None:
        self.begun_s = time.time()
        self.conversation.begin()

    def cancel(self) -> None:
        self.conversation.cancel()

    async def parts(self) -> AsyncGenerator[tuple[Block, str], None]:
        """Blocks with what is new in them, as `Blocks.push` tells it."""
        async for said in self.conversation:
            self.first_s = self.first_s or time.time()
            for delta in said.deltas:
                for part in self.blocks.push(delta):
                    yield part
            if said.finish_reason is not None:
                self.finish_reason, self.stop = said.finish_reason, said.piece.stop

    async def finished(self) -> None:
        async for _ in self.parts():
            pass

    @property
    def used(self) -> dict[str, Any]:
        """OpenAI's usage; cached_tokens and reasoning_tokens at the top."""
        speaker = self.conversation.speakers[0]
        found = usage(self.conversation.choices, speaker.reasoning_tokens)
        cached = (found["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        return {**found, "cached_tokens": cached, "reasoning_tokens": speaker.reasoning_tokens}


def conversation_of(request: Translated) -> ConversationRequest:
    try:
        fields = request.fields()
    except (
        AttributeError,
        TypeError,
    ) as error:  # a value where an object is expected, or the other way round
        raise RequestError(f"a part of the body has another form than it may have: {error}") from None
    return ConversationRequest.made(fields, Reading(strict=False))


def event(kind: str, **fields: Any) -> str:
    """A named event of a stream."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


def text_of(content: Any, kinds: Sequence[str], where: str) -> str:
    """A text, or a list of parts of these kinds, as one text; RequestError for what is none."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(text, str):
            raise RequestError(f"{where} holds {str(kind)[:80]!r}; the model reads text", where)
        texts.append(text)
    return "\n".join(texts)


def own_tools(tools: list[dict[str, Any]], kind: str, info: ValidationInfo) -> list[dict[str, Any]]:
    """Those of this type, which the client runs; what the API's makers run cannot be called here."""
    reading = info.context or STRICTLY
    for other in [str(tool.get("type"))[:SHOWN_CHARS] for tool in tools if tool.get("type", kind) != kind]:
        if reading.strict:
            refuse("tools", f"tools has one of the type {other!r}; allowed is {kind!r}")
        reading.unused[f"tools[].{other}"] = None
    return [tool for tool in tools if tool.get("type", kind) == kind]


def function(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool as chat completions have it."""
    given = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {k: value for k, value in given.items() if value is not None}}


def call(call_id: Any, name: Any, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def arguments_of(block: Block) -> Any:
    """Of a call, as a value; {"cut": ...} where the limit of tokens has ended them."""
    try:
        return json.loads(block.text or "{}")
    except ValueError:
        return {"cut": block.text}
