"""/v1/chat/completions: a conversation in the model's own template, answered by a message."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

from ..chat import ASSISTANT
from .answers import Envelope, conversation_logprobs
from .choices import Choices, Piece, joined
from .context import ServingContext
from .scheduler import Grammar
from .schema import ConversationRequest, RequestError

BEGIN: dict[str, Any] = {"role": ASSISTANT, "content": "", "refusal": None}


class ConversationAnswer:
    """An answer under way: iterate for the JSON of chunks, or await `whole`; then, or at any time, `cancel` it."""

    def __init__(self, request: ConversationRequest, context: ServingContext):
        """Submits the request: RequestError, and what `Scheduler.submit` raises."""
        self.request, self.context = request, context
        if request.tools:
            raise RequestError("tools are not supported yet", "tools", "unsupported_parameter")
        try:
            self.prompt = context.prompts.conversation(
                [message.plain() for message in request.messages],
                tools=request.tools,
                add_generation_prompt=request.add_generation_prompt,
                variables=request.chat_template_kwargs,
            )
        except RequestError:
            raise
        except ValueError as error:  # ChatError among them
            raise RequestError(str(error), "messages") from None
        limit = context.room(request, [self.prompt], request.max_completion_tokens or request.max_tokens, "messages")
        logprobs = request.top_logprobs or 0 if request.logprobs else None
        options = request.options(context.sampling_defaults, limit, logprobs)
        self.choices = Choices(context, [self.prompt], request.n, options, request.stops, grammar=self._grammar)
        self.envelope = Envelope(self.choices, "chatcmpl", "chat.completion.chunk", request)

    def cancel(self) -> None:
        self.choices.cancel()

    def _grammar(self) -> Grammar | None:
        if self.request.response_format not in (None, {"type": "text"}):
            raise RequestError("response_format is not supported yet", "response_format", "unsupported_parameter")
        return None

    async def __aiter__(self) -> AsyncGenerator[str, None]:
        for choice in range(self.request.n):
            yield self._chunk(Piece(choice), BEGIN)
        async for piece in self.choices:
            if piece.text or piece.tokens or (piece.ids and self.request.return_token_ids):
                yield self._chunk(piece._replace(finish_reason=None), {"content": piece.text})
            if piece.finish_reason is not None:
                yield self._chunk(Piece(piece.choice, finish_reason=piece.finish_reason), {})
        for chunk in self.envelope.end():
            yield chunk

    def _chunk(self, piece: Piece, delta: dict[str, Any]) -> str:
        logprobs = conversation_logprobs(self.context, piece.tokens) if piece.tokens else None
        return self.envelope.chunk(piece, "delta", json.dumps(delta), logprobs, **self._ids(piece))

    def _ids(self, piece: Piece) -> dict[str, Any]:
        return {"token_ids": list(piece.ids)} if self.request.return_token_ids else {}

    async def whole(self) -> dict[str, Any]:
        pieces: list[list[Piece]] = [[] for _ in range(self.request.n)]
        async for piece in self.choices:
            pieces[piece.choice].append(piece)
        answer = self.envelope.whole([self._choice(joined(found)) for found in pieces])
        return {**answer, "prompt_token_ids": self.prompt} if self.request.return_token_ids else answer

    def _choice(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.choice,
            "message": {**BEGIN, "content": piece.text, "annotations": []},
            "logprobs": conversation_logprobs(self.context, piece.tokens) if self.request.logprobs else None,
            "finish_reason": piece.finish_reason,
            **self._ids(piece),
        }
