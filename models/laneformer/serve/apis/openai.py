"""OpenAI's objects: answers and their chunks, log-probabilities in both forms, usage."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from ..choices import Choices, Piece, Usage, Written, join_pieces
from ..context import ServingContext
from ..schema import CompletionRequest, ConversationRequest
from ..sending import Answer, ClientError

DONE = "data: [DONE]\n\n"
MIN_LOGPROB = -9999.0  # OpenAI's, for an impossible token: JSON has no infinity


class OpenAIAnswer(Answer):
    """What /v1/completions and /v1/chat/completions share."""

    def __init__(
        self,
        request: CompletionRequest | ConversationRequest,
        choices: Choices,
        prefix: str,
        kind: str,
    ):
        self.streamed = request.stream
        self.context = choices.context
        self.choices = choices
        self._options = request.stream_options
        self.with_ids = request.return_token_ids
        self._begun: set[int] = set()  # choices with a chunk
        self._scored = request.logprobs is not None and request.logprobs is not False
        self._fields: dict[str, Any] = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.context.model,
            "system_fingerprint": self.context.fingerprint,
        }

    def write_failure(self, error: ClientError) -> str:
        return write_event(json.dumps(error.format_body())) + DONE

    def pieces(self) -> AsyncGenerator[Piece, None]:
        raise NotImplementedError

    def format_content(self, piece: Piece) -> dict[str, Any]:
        """Return the field of a whole choice that holds its answer."""
        raise NotImplementedError

    def format_scores(self, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    async def whole(self) -> dict[str, Any]:
        pieces: list[list[Piece]] = [[] for _ in self.choices.generated]
        async for piece in self.pieces():
            pieces[piece.choice].append(piece)
        choices = [
            self._format_choice(piece, self._scored, True, **self.format_content(piece))
            for piece in map(join_pieces, pieces)
        ]
        kind = self._fields["object"].removesuffix(".chunk")
        usage = format_usage(self.choices.count_usage())
        return {**self._fields, "object": kind, "choices": choices, "usage": usage}

    def _format_choice(
        self, piece: Piece, scored: bool, first: bool, **content: Any
    ) -> dict[str, Any]:
        # vLLM's fields
        ids: dict[str, Any] = {}
        if self.with_ids:
            prompt = self.choices.prompts[piece.choice // self.choices.n] if first else None
            ids = {"token_ids": list(piece.ids), "prompt_token_ids": prompt}
        return {
            "index": piece.choice,
            **content,
            "logprobs": self.format_scores(piece) if scored else None,
            "finish_reason": piece.finish_reason,
            **ids,
        }

    def write_chunk(self, piece: Piece, **content: Any) -> str:
        """Return an event; `content` is the choice's field for what is new."""
        first = piece.choice not in self._begun
        self._begun.add(piece.choice)
        choice = self._format_choice(piece, bool(piece.tokens), first, **content)
        return self._write_body([choice], self._options.continuous_usage_stats)

    def write_end(self) -> str:
        """Return the last chunk, where usage is wanted, and the end of the stream."""
        return (self._write_body([], True) if self._options.include_usage else "") + DONE

    def _write_body(self, choices: list[dict[str, Any]], counts: bool) -> str:
        body = {**self._fields, "choices": choices}
        # As in OpenAI's API, usage is null in all chunks but the last
        if self._options.include_usage or counts:
            body["usage"] = format_usage(self.choices.count_usage()) if counts else None
        return write_event(json.dumps(body))


def write_event(data: str) -> str:
    return f"data: {data}\n\n"


def format_usage(usage: Usage) -> dict[str, Any]:
    details: Any = [None, None]
    if usage.cached is not None:
        details = [
            {"cached_tokens": usage.cached, "audio_tokens": 0},
            {
                "reasoning_tokens": usage.reasoning,
                "audio_tokens": 0,
                "accepted_prediction_tokens": usage.accepted,
                "rejected_prediction_tokens": usage.proposed - usage.accepted,
            },
        ]
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": details[0],
        "completion_tokens_details": details[1],
    }


def clamp_logprob(logprob: float | None) -> float:
    return MIN_LOGPROB if logprob is None else max(logprob, MIN_LOGPROB)


def format_completion_logprobs(
    context: ServingContext, written: Iterable[Written]
) -> dict[str, list[Any]]:
    scores: dict[str, list[Any]] = {
        "text_offset": [],
        "token_logprobs": [],
        "tokens": [],
        "top_logprobs": [],
    }
    for token, offset in written:
        top: dict[str, float] = {}
        for i, logprob in ((token.id, token.logprob), *token.top):
            text = context.spell_token(i)
            # Several ids may have one spelling: the likeliest counts
            top[text] = max(clamp_logprob(logprob), top.get(text, MIN_LOGPROB))
        # The first token of a prompt has no log-probability
        scored = token.logprob is not None
        scores["text_offset"].append(offset)
        scores["token_logprobs"].append(clamp_logprob(token.logprob) if scored else None)
        scores["tokens"].append(context.spell_token(token.id))
        scores["top_logprobs"].append(top if scored else None)
    return scores


def format_conversation_logprobs(
    context: ServingContext, written: Iterable[Written]
) -> dict[str, Any]:

    def entry(i: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": context.spell_token(i),
            "logprob": clamp_logprob(logprob),
            "bytes": list(context.encode_token(i)),
        }

    content = [
        {**entry(token.id, token.logprob), "top_logprobs": [entry(*pair) for pair in token.top]}
        for token, _ in written
    ]
    return {"content": content, "refusal": None}
