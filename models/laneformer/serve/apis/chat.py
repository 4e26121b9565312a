"""/v1/chat/completions: a conversation in the model's own template, answered by a message, or
by calls of tools.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from ...chat import ASSISTANT
from ..choices import Piece
from ..context import ServingContext
from ..conversation import Block, Conversation
from ..schema import ConversationRequest
from .blocks import function_call
from .openai import OpenAIAnswer, conversation_logprobs, usage_of

BEGIN: dict[str, Any] = {"role": ASSISTANT, "content": "", "refusal": None}


class ConversationAnswer(OpenAIAnswer):
    def __init__(self, request: ConversationRequest, context: ServingContext):
        """In any thread; RequestError for what cannot be answered."""
        self.request, self.conversation = request, Conversation(request, context)
        super().__init__(request, self.conversation.choices, "chatcmpl", "chat.completion.chunk")

    def usage(self) -> dict[str, Any]:
        reasoning_tokens = sum(answer.reasoning_tokens for answer in self.conversation.answers)
        return usage_of(self.choices, reasoning_tokens)

    async def __aiter__(self) -> AsyncGenerator[str, None]:
        for choice in range(self.request.n):
            yield self.chunk(Piece(choice), delta=BEGIN)
        async for piece, parts in self.conversation:
            tokens = piece._replace(finish_reason=None)
            deltas = [
                self.delta(piece.choice, block, text)
                for block, text in parts
                if text or block.kind == "call"
            ]
            if not deltas and (tokens.tokens or (tokens.ids and self.request.return_token_ids)):
                deltas = [{}]
            for delta in deltas:
                yield self.chunk(tokens, delta=delta)
                tokens = Piece(tokens.choice)  # they are told once
            if piece.finish_reason is not None:
                yield self.chunk(Piece(piece.choice, finish_reason=piece.finish_reason), delta={})
        yield self.end()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        async for piece, _ in self.conversation:
            yield piece

    def content(self, piece: Piece) -> dict[str, Any]:
        answer = self.conversation.answers[piece.choice]
        text, reasoning = answer.text_of("text"), answer.text_of("reasoning")
        message = {**BEGIN, "content": text, "annotations": []}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls := [function_call(block.id, block.name, block.text) for block in answer.calls()]:
            message |= {"content": text if text.strip() else None, "tool_calls": calls}
        return {"message": message}

    def scores(self, piece: Piece) -> dict[str, Any]:
        return conversation_logprobs(self.context, piece.tokens)

    def delta(self, choice: int, block: Block, text: str) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"reasoning_content": text}
        if block.kind == "text":
            return {"content": text}
        index = self.conversation.answers[choice].calls().index(block)
        call = (
            {"function": {"arguments": text}} if text else function_call(block.id, block.name, "")
        )
        return {"tool_calls": [{"index": index, **call}]}
