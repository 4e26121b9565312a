"""/v1/completions: text or ids to text; `echo` puts the prompt in front, with its scores."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from ...engine import GeneratedToken
from ...engine.text import TextStream
from ..choices import Choices, Piece, Written
from ..context import ServingContext
from ..schema import UNTIL_THE_END, CompletionRequest
from .openai import OpenAIAnswer, format_completion_logprobs


class CompletionAnswer(OpenAIAnswer):
    def __init__(self, request: CompletionRequest, context: ServingContext):
        prompts = [encode_prompt(prompt, context) for prompt in request.prompt]
        max_tokens = None if request.max_tokens == UNTIL_THE_END else request.max_tokens
        limit = context.limit_tokens(request, prompts, max_tokens, "prompt")
        options = None
        if limit:
            defaults = context.completion_defaults
            options = request.generation_options(defaults, limit, request.logprobs)
        score_top = request.logprobs if request.echo else None
        choices = Choices(context, prompts, request.n, options, request.stop, score_top)
        for prompt in request.prompt:
            if isinstance(prompt, str):
                names = context.prompt_encoder.find_control_tokens(prompt)
                choices.unused += [f"prompt: {name}" for name in names]
        super().__init__(request, choices, "cmpl", "text_completion")
        self.request = request
        self._echoed: dict[int, int] = {}  # characters of the prompt in front of a begun choice

    async def __aiter__(self) -> AsyncGenerator[str, None]:
        async for piece in self.pieces():
            if piece.text or piece.tokens or piece.finish_reason or self.with_ids:
                yield self.write_chunk(piece, text=piece.text)
        yield self.write_end()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        async for piece in self.choices:
            yield self._add_prompt(piece)

    def format_content(self, piece: Piece) -> dict[str, Any]:
        return {"text": piece.text}

    def format_scores(self, piece: Piece) -> dict[str, Any]:
        return format_completion_logprobs(self.context, piece.tokens)

    def _add_prompt(self, piece: Piece) -> Piece:
        """Return the piece, behind its prompt where the choice begins and the prompt is repeated."""
        echoes = self.request.echo and piece.choice not in self._echoed
        prompt_text, tokens = self._echo(piece) if echoes else ("", [])
        shift = self._echoed.setdefault(piece.choice, len(prompt_text))
        tokens += [Written(token, shift + offset) for token, offset in piece.tokens]
        return piece._replace(text=prompt_text + piece.text, tokens=tokens)

    def _echo(self, piece: Piece) -> tuple[str, list[Written]]:
        """Return the prompt as text, and with `logprobs` its tokens."""
        prompt = piece.choice // self.request.n
        source = self.request.prompt[prompt]
        ids = self.choices.prompts[prompt]
        text = source if isinstance(source, str) else self.context.tokenizer.decode(ids)
        if self.request.logprobs is None:
            return text, []
        # Nothing comes before the first token, so it has no score
        tokens = [GeneratedToken(ids[0])]
        if (scores := piece.scores) is not None:
            tokens += GeneratedToken.attach_scores(
                ids[1:], (scores.logprobs, scores.top_ids.ravel(), scores.top_logprobs.ravel())
            )
        stream = TextStream(self.context.tokenizer, [])
        offset = 0
        placed = []
        for token in tokens:
            placed.append(Written(token, offset))
            offset += len(stream.push(token.id))
        return text, placed


def encode_prompt(prompt: str | list[int], context: ServingContext) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    return context.prompt_encoder.encode_text(context.check_length(prompt, "prompt"))
