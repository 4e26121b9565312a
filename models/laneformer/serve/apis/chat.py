"""/v1/chat/completions: a conversation, answered by a message or by calls of tools."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from ...chat import ASSISTANT
from ..choices import Piece
from ..context import ServingContext
from ..conversation import Block, Conversation
from ..schema import ConversationRequest
from .blocks import make_call
from .openai import OpenAIAnswer, format_conversation_logprobs

BEGIN: dict[str, Any] = {"role": ASSISTANT, "content": "", "refusal": None}


class ConversationAnswer(OpenAIAnswer):
    def __init__(self, request: ConversationRequest, context: ServingContext):
        self.request = request
        self.conversation = Conversation(request, context)
        super().__init__(request, self.conversation.choices, "chatcmpl", "chat.completion.chunk")

    async def __aiter__(self) -> AsyncGenerator[str, None]:
        for choice in range(self.request.n):
            yield self.write_chunk(Piece(choice), delta=BEGIN)
        async for piece, parts in self.conversation:
            tokens = piece._replace(finish_reason=None)
            deltas = [
                self.format_delta(piece.choice, block, text)
                for block, text in parts
                if text or block.kind == "call"
            ]
            # Tokens without new text still carry their log-probabilities and ids
            if not deltas and (tokens.tokens or (tokens.ids and self.request.return_token_ids)):
                deltas = [{}]
            for delta in deltas:
                yield self.write_chunk(tokens, delta=delta)
                tokens = Piece(tokens.choice)  # its tokens go with the first delta
            if piece.finish_reason is not None:
                yield self.write_chunk(
                    Piece(piece.choice, finish_reason=piece.finish_reason), delta={}
                )
        yield self.write_end()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        async for piece, _ in self.conversation:
            yield piece

    def format_content(self, piece: Piece) -> dict[str, Any]:
        answer = self.conversation.answers[piece.choice]
        text = answer.join_text("text")
        reasoning = answer.join_text("reasoning")
        message = {**BEGIN, "content": text, "annotations": []}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls := [make_call(block.id, block.name, block.text) for block in answer.list_calls()]:
            message |= {"content": text if text.strip() else None, "tool_calls": calls}
        return {"message": message}

    def format_scores(self, piece: Piece) -> dict[str, Any]:
        return format_conversation_logprobs(self.context, piece.tokens)

    def format_delta(self, choice: int, block: Block, text: str) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"reasoning_content": text}
        if block.kind == "text":
            return {"content": text}
        index = self.conversation.answers[choice].list_calls().index(block)
        call = {"function": {"arguments": text}} if text else make_call(block.id, block.name, "")
        return {"tool_calls": [{"index": index, **call}]}
