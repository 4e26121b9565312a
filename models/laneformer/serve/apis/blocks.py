"""Shared base of the APIs whose answers are blocks: Responses, Messages and Ollama."""

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
from .openai import usage_of


class TranslatedRequest(Request):
    """A body that is a chat completion in other words."""

    max_tokens: Limit = None

    def fields(self) -> dict[str, Any]:
        """Of the ConversationRequest, beside those that all APIs share."""
        raise NotImplementedError

    def conversation(self) -> ConversationRequest:
        try:
            fields = sampling_of(self) | self.fields()
        except (AttributeError, TypeError) as error:  # a value in the place of an object
            raise RequestError(
                f"messages have a part of another form: {error}", "messages"
            ) from None
        return ConversationRequest.from_fields(fields, Reading(strict=False))


def sampling_of(body: Sampling) -> dict[str, Any]:
    """What a body says of how tokens are drawn, and how many."""
    return body.model_dump(include={*Sampling.model_fields, "max_tokens"}, exclude_unset=True)


class BlockAnswer(Answer):
    """finish_reason, stop: OpenAI's reason and the stop string, once it has ended."""

    def __init__(self, request: TranslatedRequest, context: ServingContext):
        self.context, self.streamed = context, request.stream
        self.model = request.model or context.model
        self.conversation = Conversation(request.conversation(), context)
        self.choices = self.conversation.choices
        self.answer = self.conversation.answers[0]
        self.blocks = self.answer.blocks
        self.finish_reason: str | None = None
        self.stop: str | None = None
        self.begun_s = self.first_s = 0.0  # when it was submitted, and when the first text came

    def begin(self) -> None:
        self.begun_s = time.time()
        super().begin()

    async def parts(self) -> AsyncGenerator[Part, None]:
        """Blocks with what is new in them; a new one comes without text first."""
        async for piece, parts in self.conversation:
            self.first_s = self.first_s or time.time()
            for part in parts:
                yield part
            if piece.finish_reason is not None:
                self.finish_reason, self.stop = piece.finish_reason, piece.stop

    async def whole(self) -> dict[str, Any]:
        async for _ in self.parts():
            pass
        return self.whole_answer()

    async def __aiter__(self) -> AsyncGenerator[str, None]:
        yield self.opening()
        last: Block | None = None
        async for block, text in self.parts():
            if text:
                yield self.more(block, text)
            else:
                yield (self.end_of(last) if last else "") + self.begin_of(block)
                last = block
        yield (self.end_of(last) if last else "") + self.closing()

    # What an API says: the whole answer, or the events of a stream

    def whole_answer(self) -> dict[str, Any]:
        raise NotImplementedError

    def opening(self) -> str:
        return ""

    def begin_of(self, block: Block) -> str:
        return ""

    def more(self, block: Block, text: str) -> str:
        raise NotImplementedError

    def end_of(self, block: Block) -> str:
        return ""

    def closing(self) -> str:
        raise NotImplementedError

    @property
    def used(self) -> dict[str, Any]:
        """OpenAI's usage; cached_tokens and reasoning_tokens at the top."""
        reasoning_tokens = self.answer.reasoning_tokens
        usage = usage_of(self.choices, reasoning_tokens)
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        return {**usage, "cached_tokens": cached, "reasoning_tokens": reasoning_tokens}


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


def own_tools(kind: str) -> AfterValidator:
    """Keeps tools of this type, which the client runs; what the API's makers run cannot be called here."""

    def leave_out_others(tools: list[dict[str, Any]], info: ValidationInfo) -> list[dict[str, Any]]:
        reading: Reading = info.context or STRICTLY
        for other in {str(tool.get("type", kind))[:SHOWN_CHARS]: None for tool in tools}:
            if other != kind:
                message = f"tools has one of the type {other!r}; allowed is {kind!r}"
                reading.pass_over(f"tools[].{other}", message)
        return [tool for tool in tools if tool.get("type", kind) == kind]

    return AfterValidator(leave_out_others)


def function_tool(tool: dict[str, Any], parameters: str) -> dict[str, Any]:
    """A tool as chat completions have it. parameters: the field of its schema."""
    function = {"name": tool.get("name"), "description": tool.get("description")}
    return {"type": "function", "function": {**function, "parameters": tool.get(parameters)}}


def function_call(call_id: Any, name: Any, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
