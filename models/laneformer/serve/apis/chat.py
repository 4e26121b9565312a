"""/v1/chat/completions: a conversation in the model's own template, answered by a message, or
by calls of tools.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

from ...chat import ASSISTANT
from ..choices import Piece, joined
from ..context import ServingContext
from ..conversation import Blocks, Conversation, Said
from ..schema import ConversationRequest
from .openai import OpenAIAnswer, conversation_logprobs, usage

BEGIN: dict[str, Any] = {"role": ASSISTANT, "content": "", "refusal": None}


class ConversationAnswer(OpenAIAnswer):
    def __init__(self, request: ConversationRequest, context: ServingContext):
        """In any thread; RequestError for what cannot be answered."""
        self.request, self.conversation = request, Conversation(request, context)
        super().__init__(request, self.conversation.choices, "chatcmpl", "chat.completion.chunk")

    def usage(self) -> dict[str, Any]:
        return usage(self.choices, sum(speaker.reasoning_tokens for speaker in self.conversation.speakers))

    async def __aiter__(self) -> AsyncGenerator[str, None]:
        for choice in range(self.request.n):
            yield self.chunk(Piece(choice), "delta", json.dumps(BEGIN), first=True)
        async for said in self.conversation:
            tokens, deltas = said.piece._replace(finish_reason=None), said.deltas
            if not deltas and (tokens.tokens or (tokens.ids and self.request.return_token_ids)):
                deltas = [{}]
            for delta in deltas:
                logprobs = conversation_logprobs(self.context, tokens.tokens) if tokens.tokens else None
                yield self.chunk(tokens, "delta", json.dumps(delta), logprobs)
                tokens = Piece(tokens.choice)
            if said.finish_reason is not None:
                yield self.chunk(Piece(tokens.choice, finish_reason=said.finish_reason), "delta", "{}")
        yield self.end()

    async def whole(self) -> dict[str, Any]:
        found: list[list[Said]] = [[] for _ in self.choices.generated]
        async for said in self.conversation:
            found[said.piece.choice].append(said)
        return self.completed([self.choice(choice) for choice in found])

    def choice(self, found: list[Said]) -> dict[str, Any]:
        piece, blocks = joined([said.piece for said in found]), Blocks()
        for delta in (delta for said in found for delta in said.deltas):
            list(blocks.push(delta))
        text, reasoning = blocks.text("text"), blocks.text("reasoning")
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.text}}
            for block in blocks
            if block.kind == "call"
        ]
        message = {**BEGIN, "content": text, "annotations": []}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message |= {"content": text if text.strip() else None, "tool_calls": calls}
        return {
            "index": piece.choice,
            "message": message,
            "logprobs": conversation_logprobs(self.context, piece.tokens) if self.request.logprobs else None,
            "finish_reason": found[-1].finish_reason,
            **self.ids(piece, True),
        }
