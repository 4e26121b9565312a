"""The base of the APIs whose answers are blocks: Responses, Messages and Ollama."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from pydantic import AfterValidator, ValidationInfo

from ..bodies import SHOWN_CHARS, STRICTLY, Reading, RequestError
from ..context import ServingContext
from ..conversation import Block, Conversation, Part
from ..schema import ConversationRequest, Limit, Request, Sampling
from ..sending import Answer


class TranslatedRequest(Request):
    """A body that is a chat completion in other words."""

    max_tokens: Limit = None

    def translate_fields(self) -> dict[str, Any]:
        """Return the fields of a ConversationRequest beside those of Sampling."""
        raise NotImplementedError

    def translate(self) -> ConversationRequest:
        try:
            fields = pick_sampling(self) | self.translate_fields()
        except (AttributeError, TypeError) as error:
            # A plain value where the API has an object
            raise RequestError(
                f"messages have a part of another form: {error}", "messages"
            ) from None
        return ConversationRequest.from_fields(fields, Reading(strict=False))


def pick_sampling(body: Sampling) -> dict[str, Any]:
    return body.model_dump(include={*Sampling.model_fields, "max_tokens"}, exclude_unset=True)


class BlockAnswer(Answer):
    """An answer in blocks; `finish_reason` and `stop` are set at its end."""

    def __init__(self, request: TranslatedRequest, context: ServingContext):
        self.context = context
        self.streamed = request.stream
        self.model = request.model or context.model
        self.conversation = Conversation(request.translate(), context)
        self.choices = self.conversation.choices
        self.answer = self.conversation.answers[0]
        self.blocks = self.answer.blocks
        self.finish_reason: str | None = None
        self.stop: str | None = None
        self.begun_s = time.time()
        self.first_s = 0.0  # when the first text came

    async def parts(self) -> AsyncGenerator[Part, None]:
        """Yield blocks with their new text; a new block comes without text first."""
        async for piece, parts in self.conversation:
            self.first_s = self.first_s or time.time()
            for part in parts:
                yield part
            if piece.finish_reason is not None:
                self.finish_reason = piece.finish_reason
                self.stop = piece.stop

    async def whole(self) -> dict[str, Any]:
        async for _ in self.parts():
            pass
        return self.format_answer()

    async def __aiter__(self) -> AsyncGenerator[str, None]:
        yield self.open_stream()
        # A block ends where the next one begins, or with the stream
        last: Block | None = None
        async for block, text in self.parts():
            if text:
                yield self.write_text(block, text)
            else:
                yield (self.close_block(last) if last else "") + self.open_block(block)
                last = block
        yield (self.close_block(last) if last else "") + self.close_stream()

    # Each API formats the whole answer, or writes the events of a stream

    def format_answer(self) -> dict[str, Any]:
        raise NotImplementedError

    def open_stream(self) -> str:
        return ""

    def open_block(self, block: Block) -> str:
        return ""

    def write_text(self, block: Block, text: str) -> str:
        raise NotImplementedError

    def close_block(self, block: Block) -> str:
        return ""

    def close_stream(self) -> str:
        raise NotImplementedError


def write_event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


def read_text(content: Any, kinds: Sequence[str], where: str) -> str:
    """Return a text, or a list of parts of these kinds, as one text."""
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


def select_tools(kind: str) -> AfterValidator:
    """Return a validator that keeps tools of this type, which the client runs."""

    def leave_out_others(tools: list[dict[str, Any]], info: ValidationInfo) -> list[dict[str, Any]]:
        reading: Reading = info.context or STRICTLY
        # Tools of other types run on the servers of the API's maker
        for unusable in {str(tool.get("type", kind))[:SHOWN_CHARS]: None for tool in tools}:
            if unusable != kind:
                message = f"tools has one of the type {unusable!r}; allowed is {kind!r}"
                reading.pass_over(f"tools[].{unusable}", message)
        return [tool for tool in tools if tool.get("type", kind) == kind]

    return AfterValidator(leave_out_others)


def translate_tool(tool: dict[str, Any], parameters: str) -> dict[str, Any]:
    """Return a tool as chat completions have it; `parameters` names the field of its schema."""
    function = {"name": tool.get("name"), "description": tool.get("description")}
    return {"type": "function", "function": {**function, "parameters": tool.get(parameters)}}


def make_call(call_id: Any, name: Any, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
