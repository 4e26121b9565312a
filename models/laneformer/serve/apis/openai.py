"""OpenAI's objects: what an answer and its chunks hold, log-probabilities in both forms, usage.

A chunk of a stream is text: parts that are rendered once, with what is new between them.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable
from typing import Any

from ..choices import Choices, Piece, Written
from ..context import ServingContext
from ..schema import Sampled
from ..sending import Answer, Told

DONE = "data: [DONE]\n\n"
MIN_LOGPROB = -9999.0  # OpenAI's, for an impossible token: JSON has no infinity


class OpenAIAnswer(Answer):
    """What /v1/completions and /v1/chat/completions have in common."""

    def __init__(self, request: Sampled, choices: Choices, prefix: str, kind: str):
        self.streamed = request.stream
        self.context, self.choices, self._options = choices.context, choices, request.stream_options
        self._with_ids = request.return_token_ids
        self._fields: dict[str, Any] = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.context.model,
            "system_fingerprint": self.context.fingerprint,
        }
        self._head = json.dumps(self._fields)[:-1] + ', "choices": ['
        self._tail = '], "usage": null}' if self._options.include_usage else "]}"

    def begin(self) -> None:
        self.choices.begin()

    def cancel(self) -> None:
        self.choices.cancel()

    def failed(self, told: Told) -> str:
        return event(json.dumps(told.body())) + DONE

    def completed(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The whole answer."""
        kind = self._fields["object"].removesuffix(".chunk")
        return {**self._fields, "object": kind, "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        return usage(self.choices)

    def ids(self, piece: Piece, first: bool) -> dict[str, Any]:
        """Token ids, where they are asked for; the prompt's with the choice's first chunk."""
        if not self._with_ids:
            return {}
        prompt = self.choices.prompts[piece.choice // self.choices.n] if first else None
        return {"token_ids": list(piece.ids), "prompt_token_ids": prompt}

    def chunk(self, piece: Piece, name: str, content: str, logprobs: Any = None, first: bool = False) -> str:
        """An event. content: JSON of the choice's field `name`."""
        reason = "null" if piece.finish_reason is None else f'"{piece.finish_reason}"'
        scores = "null" if logprobs is None else json.dumps(logprobs)
        ids = f", {json.dumps(self.ids(piece, first))[1:-1]}" if self._with_ids else ""
        tail = self._used() if self._options.continuous_usage_stats else self._tail
        return event(
            f'{self._head}{{"index": {piece.choice}, "{name}": {content}, "logprobs": {scores}, '
            f'"finish_reason": {reason}{ids}}}{tail}'
        )

    def end(self) -> str:
        """The last chunk, where usage is wanted, and the end of the stream."""
        return (event(self._head + self._used()) if self._options.include_usage else "") + DONE

    def _used(self) -> str:
        return f'], "usage": {json.dumps(self.usage())}}}'


def event(data: str) -> str:
    return f"data: {data}\n\n"


def usage(choices: Choices, reasoning_tokens: int = 0) -> dict[str, Any]:
    """Tokens read and written so far; details, which the engine tells at the end, are null until then."""
    read, written = sum(map(len, choices.prompts)), sum(choices.generated)
    found = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    cached, proposed, accepted = map(choices.used, ("reused_tokens", "proposed_tokens", "accepted_tokens"))
    if cached is None or proposed is None or accepted is None:
        return {**found, "prompt_tokens_details": None, "completion_tokens_details": None}
    speculated = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": proposed - accepted}
    return {
        **found,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens, "audio_tokens": 0, **speculated},
    }


def finite(logprob: float | None) -> float:
    return MIN_LOGPROB if logprob is None else max(logprob, MIN_LOGPROB)


def completion_logprobs(context: ServingContext, written: Iterable[Written]) -> dict[str, list[Any]]:
    """The form of /v1/completions. A token without a log-probability (the first of a prompt) has null."""
    found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token, offset in written:
        top: dict[str, float] = {}
        for i, logprob in ((token.id, token.logprob), *token.top):
            text = context.token_text(i)
            top[text] = max(
                finite(logprob), top.get(text, MIN_LOGPROB)
            )  # of ids spelled alike, the likeliest
        scored = token.logprob is not None
        found["text_offset"].append(offset)
        found["token_logprobs"].append(finite(token.logprob) if scored else None)
        found["tokens"].append(context.token_text(token.id))
        found["top_logprobs"].append(top if scored else None)
    return found


def conversation_logprobs(context: ServingContext, written: Iterable[Written]) -> dict[str, Any]:
    """The form of /v1/chat/completions."""

    def entry(i: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": context.token_text(i),
            "logprob": finite(logprob),
            "bytes": list(context.token_bytes(i)),
        }

    content = [
        {**entry(token.id, token.logprob), "top_logprobs": [entry(*pair) for pair in token.top]}
        for token, _ in written
    ]
    return {"content": content, "refusal": None}
