"""/v1/completions: text or ids to text, with the prompt repeated and scored where that is asked for."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from ...engine import GeneratedToken
from ...engine.text import TextStream
from ..choices import Choices, Piece, Written
from ..context import ServingContext
from ..schema import UNTIL_THE_END, CompletionRequest
from .openai import OpenAIAnswer, completion_logprobs


class CompletionAnswer(OpenAIAnswer):
    def __init__(self, request: CompletionRequest, context: ServingContext):
        """In any thread; RequestError for what cannot be answered."""
        prompts = [encode(prompt, context) for prompt in request.prompt]
        wanted = None if request.max_tokens == UNTIL_THE_END else request.max_tokens
        limit = context.room(request, prompts, wanted, "prompt")
        options = (
            request.generation_options(context.completion_defaults, limit, request.logprobs)
            if limit
            else None
        )
        score_top = request.logprobs if request.echo else None
        choices = Choices(context, prompts, request.n, options, request.stop, score_top)
        texts = [prompt for prompt in request.prompt if isinstance(prompt, str)]
        choices.unused = [
            f"prompt: {name}" for text in texts for name in context.prompts.spelled_in(text)
        ]
        super().__init__(request, choices, "cmpl", "text_completion")
        self.request = request
        # by choice that has begun: characters of the prompt in front
        self._echoed: dict[int, int] = {}

    async def __aiter__(self) -> AsyncGenerator[str, None]:
        async for piece in self.pieces():
            if piece.text or piece.tokens or piece.finish_reason or self.with_ids:
                yield self.chunk(piece, text=piece.text)
        yield self.end()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        async for piece in self.choices:
            yield self._behind_prompt(piece)

    def content(self, piece: Piece) -> dict[str, Any]:
        return {"text": piece.text}

    def scores(self, piece: Piece) -> dict[str, Any]:
        return completion_logprobs(self.context, piece.tokens)

    def _behind_prompt(self, piece: Piece) -> Piece:
        """The piece, behind its prompt where that is repeated."""
        echoes = self.request.echo and piece.choice not in self._echoed
        before, tokens = self._echo(piece) if echoes else ("", [])
        moved = self._echoed.setdefault(piece.choice, len(before))
        tokens += [Written(token, moved + offset) for token, offset in piece.tokens]
        return piece._replace(text=before + piece.text, tokens=tokens)

    def _echo(self, piece: Piece) -> tuple[str, list[Written]]:
        """The prompt as text, and with `logprobs` its tokens; nothing comes before the first,
        so that has none.
        """
        prompt = piece.choice // self.request.n
        asked, ids = self.request.prompt[prompt], self.choices.prompts[prompt]
        text = asked if isinstance(asked, str) else self.context.tokenizer.decode(ids)
        if self.request.logprobs is None:
            return text, []
        tokens = [GeneratedToken(ids[0])]
        if (s := piece.scores) is not None:
            tokens += GeneratedToken.attach_scores(
                ids[1:], (s.logprobs, s.top_ids.ravel(), s.top_logprobs.ravel())
            )
        stream, offset, placed = TextStream(self.context.tokenizer, []), 0, []
        for token in tokens:
            placed.append(Written(token, offset))
            offset += len(stream.push(token.id))
        return text, placed


def encode(prompt: str | list[int], context: ServingContext) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    return context.prompts.text(context.check_length(prompt, "prompt"))
