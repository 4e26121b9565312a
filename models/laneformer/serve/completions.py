"""/v1/completions: text or ids to text, with the prompt repeated and scored where that is asked for."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ..engine import GeneratedToken, PromptLogprobs
from ..engine.text import TextStream
from .answers import Envelope, completion_logprobs
from .choices import Choices, Piece, Written, joined
from .context import ServingContext
from .schema import CompletionRequest

DEFAULT_TOKENS = 16  # OpenAI's


class CompletionAnswer:
    """An answer under way: iterate for the JSON of chunks, or await `whole`; then, or at any time, `cancel` it."""

    def __init__(self, request: CompletionRequest, context: ServingContext):
        """Submits the request: RequestError, and what `Scheduler.submit` raises."""
        self.request, self.context = request, context
        self.prompts = [context.prompts.text(p) if isinstance(p, str) else p for p in request.prompts]
        wanted = DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens
        limit = context.room(request, self.prompts, wanted, "prompt")
        options = request.options(context.sampling_defaults, limit, request.logprobs) if limit else None
        score_top = request.logprobs if request.echo else None
        self.choices = Choices(context, self.prompts, request.n, options, request.stops, score_top)
        self.envelope = Envelope(self.choices, "cmpl", "text_completion", request)
        self._echoed: dict[int, int] = {}  # by choice that has begun: characters of the prompt in front
        self._scores: dict[int, PromptLogprobs] = {}  # by prompt

    def cancel(self) -> None:
        self.choices.cancel()

    async def __aiter__(self) -> AsyncGenerator[str, None]:
        async for piece in self.choices:
            first = piece.choice not in self._echoed
            shown = self._shown(piece)
            if shown.text or shown.tokens or shown.finish_reason or (shown.ids and self.request.return_token_ids):
                logprobs = completion_logprobs(self.context, shown.tokens) if shown.tokens else None
                yield self.envelope.chunk(shown, "text", json.dumps(shown.text), logprobs, **self._ids(shown, first))
        for chunk in self.envelope.end():
            yield chunk

    async def whole(self) -> dict[str, Any]:
        pieces: list[list[Piece]] = [[] for _ in self.choices.generated]
        async for piece in self.choices:
            pieces[piece.choice].append(self._shown(piece))
        return self.envelope.whole([self._choice(joined(found)) for found in pieces])

    def _choice(self, piece: Piece) -> dict[str, Any]:
        scored = self.request.logprobs is not None
        return {
            "index": piece.choice,
            "text": piece.text,
            "logprobs": completion_logprobs(self.context, piece.tokens) if scored else None,
            "finish_reason": piece.finish_reason,
            **self._ids(piece, True),
        }

    def _ids(self, piece: Piece, first: bool) -> dict[str, Any]:
        if not self.request.return_token_ids:
            return {}
        prompt = self.prompts[piece.choice // self.request.n] if first else None
        return {"token_ids": list(piece.ids), "prompt_token_ids": prompt}

    def _shown(self, piece: Piece) -> Piece:
        """The piece, behind its prompt where that is repeated."""
        before, tokens = "", list[Written]()
        if piece.choice not in self._echoed:
            if self.request.echo:
                before, tokens = self._echo(piece)
            self._echoed[piece.choice] = len(before)
        moved = self._echoed[piece.choice]
        tokens += [Written(token, moved + offset) for token, offset in piece.tokens]
        return piece._replace(text=before + piece.text, tokens=tokens)

    def _echo(self, piece: Piece) -> tuple[str, list[Written]]:
        """The prompt as text, and with `logprobs` its tokens; nothing comes before the first, so that has none."""
        prompt = piece.choice // self.request.n
        given, ids = self.request.prompts[prompt], self.prompts[prompt]
        text = given if isinstance(given, str) else self.context.tokenizer.decode(ids)
        if self.request.logprobs is None:
            return text, []
        if piece.scores is not None:
            self._scores[prompt] = piece.scores
        tokens = [GeneratedToken(ids[0])]
        if (s := self._scores.get(prompt)) is not None:
            tokens += GeneratedToken.described(ids[1:], (s.logprobs, s.top_ids.ravel(), s.top_logprobs.ravel()))
        return text, self._placed(tokens)

    def _placed(self, tokens: Sequence[GeneratedToken]) -> list[Written]:
        stream, offset, placed = TextStream(self.context.tokenizer, []), 0, []
        for token in tokens:
            placed.append(Written(token, offset))
            offset += len(stream.push(token.id))
        return placed
