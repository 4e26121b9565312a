"""OpenAI's objects: what an answer and its chunks hold, log-probabilities in both forms, usage.

A chunk of a stream is text: parts that are rendered once, with what is new between them.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable
from typing import Any

from .choices import Choices, Piece, Written
from .context import ServingContext
from .schema import Sampled

LEAST_LOGPROB = -9999.0  # OpenAI's, for an impossible token: JSON has no infinity


class Envelope:
    """What all chunks of one answer have in common."""

    def __init__(self, choices: Choices, prefix: str, kind: str, request: Sampled):
        self.choices, self.options = choices, request.stream_options
        self.fields: dict[str, Any] = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": choices.context.model,
            "system_fingerprint": choices.context.fingerprint,
        }
        self._head = json.dumps(self.fields)[:-1] + ', "choices": ['
        self._tail = '], "usage": null}' if self.options.include_usage else "]}"

    def chunk(self, piece: Piece, name: str, content: str, logprobs: Any = None, **more: Any) -> str:
        """content: JSON of the choice's field `name`; more: its further fields."""
        reason = "null" if piece.finish_reason is None else f'"{piece.finish_reason}"'
        scores = "null" if logprobs is None else json.dumps(logprobs)
        further = "".join(f', "{field}": {json.dumps(value)}' for field, value in more.items())
        tail = self._counted() if self.options.continuous_usage_stats else self._tail
        return (
            f'{self._head}{{"index": {piece.choice}, "{name}": {content}, "logprobs": {scores}, '
            f'"finish_reason": {reason}{further}}}{tail}'
        )

    def end(self) -> list[str]:
        """The last chunk, where usage is wanted."""
        return [self._head + self._counted()] if self.options.include_usage else []

    def whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = self.fields["object"].removesuffix(".chunk")
        return {**self.fields, "object": kind, "choices": choices, "usage": usage(self.choices)}

    def _counted(self) -> str:
        return f'], "usage": {json.dumps(usage(self.choices))}}}'


def usage(choices: Choices) -> dict[str, Any]:
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
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0, **speculated},
    }


def finite(logprob: float | None) -> float:
    return LEAST_LOGPROB if logprob is None else max(logprob, LEAST_LOGPROB)


def completion_logprobs(context: ServingContext, written: Iterable[Written]) -> dict[str, list[Any]]:
    """The form of /v1/completions. A token without a log-probability (the first of a prompt) has null."""
    found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token, offset in written:
        top: dict[str, float] = {}
        for i, logprob in ((token.id, token.logprob), *token.top):
            text = context.token_text(i)
            top[text] = max(finite(logprob), top.get(text, LEAST_LOGPROB))  # of ids spelled alike, the likeliest
        scored = token.logprob is not None
        found["text_offset"].append(offset)
        found["token_logprobs"].append(finite(token.logprob) if scored else None)
        found["tokens"].append(context.token_text(token.id))
        found["top_logprobs"].append(top if scored else None)
    return found


def conversation_logprobs(context: ServingContext, written: Iterable[Written]) -> dict[str, Any]:
    """The form of /v1/chat/completions."""

    def entry(i: int, logprob: float | None) -> dict[str, Any]:
        return {"token": context.token_text(i), "logprob": finite(logprob), "bytes": list(context.token_bytes(i))}

    content = [
        {**entry(token.id, token.logprob), "top_logprobs": [entry(*pair) for pair in token.top]} for token, _ in written
    ]
    return {"content": content, "refusal": None}
