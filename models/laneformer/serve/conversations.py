"""/v1/chat/completions: a conversation in the model's own template, answered by a message, or
by calls of tools.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncGenerator
from typing import Any

from ..chat import ASSISTANT
from .answers import Answer, conversation_logprobs
from .choices import Choices, Piece
from .context import ServingContext
from .grammar import Grammar
from .schema import ConversationRequest, RequestError, texts_of

BEGIN: dict[str, Any] = {"role": ASSISTANT, "content": "", "refusal": None}


class ConversationAnswer(Answer):
    def __init__(self, request: ConversationRequest, context: ServingContext):
        """Submits the request: RequestError, and what `Scheduler.submit` raises."""
        self.request, self.grammars = request, context.grammars
        try:
            self.tools = context.tool_calling.use(
                request.tools, request.tool_choice, request.parallel_tool_calls
            )
            prompt = context.prompts.conversation(
                self.tools.messages([message.plain() for message in request.messages]),
                tools=self.tools.template_tools,
                add_generation_prompt=request.add_generation_prompt,
                variables=request.chat_template_kwargs,
            )
        except RequestError:
            raise
        except Exception as error:  # a template is the makers' program, run on a client's data
            raise RequestError(str(error), "messages") from None
        limit = context.room(
            request, [prompt], request.max_completion_tokens or request.max_tokens, "messages"
        )
        options = request.options(
            context.conversation_defaults, limit, request.top_logprobs or 0 if request.logprobs else None
        )
        if request.prediction is not None:
            expected = context.prompts.text("".join(texts_of(request.prediction.content)), False)
            options = dataclasses.replace(options, prediction=expected)
        self.parsers = [self.tools.parser() for _ in range(request.n)]
        choices = Choices(
            context, [prompt], request.n, options, request.stop,
            grammar=self._grammar, with_control_tokens=self.parsers[0] is not None,
        )  # fmt: skip
        super().__init__(request, choices, "chatcmpl", "chat.completion.chunk")

    def _grammar(self) -> Grammar | None:
        try:
            calls, form = self.tools.grammar(), self.grammars.of_response_format(self.request.response_format)
        except RequestError:
            raise
        except ValueError as error:
            raise RequestError(str(error)) from None
        if calls and form:
            raise RequestError(
                "response_format cannot be combined with tools; send one of them", "response_format"
            )
        return calls or form

    async def __aiter__(self) -> AsyncGenerator[str, None]:
        for choice in range(self.request.n):
            yield self.chunk(Piece(choice), "delta", json.dumps(BEGIN), first=True)
        async for piece in self.choices:
            tokens, deltas = piece._replace(finish_reason=None), self._deltas(piece)
            if not deltas and (piece.tokens or (piece.ids and self.request.return_token_ids)):
                deltas = [{}]
            for delta in deltas:
                logprobs = conversation_logprobs(self.context, tokens.tokens) if tokens.tokens else None
                yield self.chunk(tokens, "delta", json.dumps(delta), logprobs)
                tokens = Piece(piece.choice)
            if piece.finish_reason is not None:
                yield self.chunk(Piece(piece.choice, finish_reason=self._reason(piece)), "delta", "{}")
        for chunk in self.end():
            yield chunk

    def _deltas(self, piece: Piece) -> list[dict[str, Any]]:
        parser = self.parsers[piece.choice]
        if parser is None:
            return [{"content": piece.text}] if piece.text else []
        return parser.push(piece.text) + (parser.finish() if piece.finish_reason is not None else [])

    def _reason(self, piece: Piece) -> str | None:
        parser = self.parsers[piece.choice]
        called = piece.finish_reason == "stop" and parser is not None and parser.called
        return "tool_calls" if called else piece.finish_reason

    def choice(self, piece: Piece) -> dict[str, Any]:
        self._deltas(piece)
        parser, message = self.parsers[piece.choice], {**BEGIN, "content": piece.text, "annotations": []}
        if parser is not None:
            message |= {"content": parser.content, **({"tool_calls": parser.calls} if parser.called else {})}
        return {
            "index": piece.choice,
            "message": message,
            "logprobs": conversation_logprobs(self.context, piece.tokens) if self.request.logprobs else None,
            "finish_reason": self._reason(piece),
            **self.ids(piece, True),
        }
