"""Batch: continuous batching of requests, which join and leave between two tokens."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .decoder import (
    Collected,
    EngineLost,
    GeneratedToken,
    PromptLogprobs,
    Request,
    Statistics,
    finish_reason,
)
from .requests import Requests
from .running import ExclusiveDecoder


@dataclass(frozen=True)
class Update:
    """The progress of one request since the last call of `updates`."""

    ticket: int
    tokens: list[GeneratedToken]
    # None while it runs; then "stop" (a stop id, or all scored), "length", "cancelled"
    # (`Batch.leave`), or "error" with `error`
    finish_reason: str | None = None
    # of a finished scoring request
    scores: PromptLogprobs | None = None
    # of any finished request
    statistics: Statistics | None = None
    error: str | None = None


@dataclass
class JoinedRequest:
    request: Request
    has_left: bool = False  # `leave` was called
    last: Sequence[int] = ()  # its last token, once there is one


class Batch:
    """Decode many requests at a time (`Engine.batch`); closing it ends them all.

    Up to `max_joined` decode together; a further `join` raises RuntimeError until `updates` reports an end.
    Each request gets the tokens it would get alone. Any thread may call any method; `updates` calls
    wait for each other.
    """

    def __init__(self, exclusive: ExclusiveDecoder, requests: Requests):
        self._exclusive, self._requests = exclusive, requests
        self._joined: dict[int, JoinedRequest] = {}  # by ticket
        self._lock, self._collecting = threading.Lock(), threading.Lock()
        self._closed = False
        self._decoder = exclusive.acquire(self)
        self.max_joined = self._decoder.max_joined

    def join(self, prompt_ids: Sequence[int], *, masked: bool = False, **options: Any) -> int:
        """Begin to generate after a prompt; return the request's ticket.

        masked: each new token waits for its ids from `allow`. options: those of `Engine.generate_detailed`.
        """
        return self.begin(self.generation(prompt_ids, masked=masked, **options))

    def score(self, ids: Sequence[int], *, start: int = 1, top: int = 0) -> int:
        """Begin to score ids[start:], as `Engine.logprobs` does; return the ticket."""
        return self.begin(self.scoring(ids, start=start, top=top))

    def generation(
        self, prompt_ids: Sequence[int], *, masked: bool = False, **options: Any
    ) -> Request:
        return self._requests.generation(prompt_ids, options, masked=masked)

    def scoring(self, ids: Sequence[int], *, start: int = 1, top: int = 0) -> Request:
        return self._requests.scoring(ids, start, top)

    def begin(self, request: Request) -> int:
        with self._lock:
            if self._closed:
                raise ValueError("this batch is closed")
            ticket = self._decoder.join([request])[0]
            self._joined[ticket] = JoinedRequest(request)
        return ticket

    def leave(self, ticket: int) -> None:
        """End a request at the next token, as "cancelled" unless it had ended."""
        with self._lock:
            if ticket in self._joined:
                self._joined[ticket].has_left = True
                self._decoder.leave(ticket)

    def allow(self, ticket: int, index: int, mask: np.ndarray) -> None:
        """Set the ids possible for new token `index` (from 0) of a masked request.

        mask: bit id % 32 of word id // 32, uint32 (ceil(V / 32),).
        """
        # it may come while the pass before the draw runs
        self._decoder.allow(ticket, index, mask)

    def updates(self, timeout_s: float) -> list[Update]:
        """Wait up to `timeout_s` for updates; return them in order."""
        with self._collecting:
            return [self._update(collected) for collected in self._decoder.collect(timeout_s)]

    def _update(self, c: Collected) -> Update:
        with self._lock:  # `join` holds it until the ticket is known
            joined = self._joined[c.ticket] if c.ended is None else self._joined.pop(c.ticket)
        request, scores = joined.request, c.scores
        joined.last = c.tokens[-1:] or joined.last
        tokens = [] if request.score_from else GeneratedToken.attach_scores(c.tokens, scores)
        if c.ended is None:
            return Update(c.ticket, tokens)
        statistics = Statistics(**c.ended.statistics)
        if c.ended.error is not None:
            return Update(c.ticket, tokens, "error", None, statistics, str(c.ended.error))
        reason = finish_reason(request, joined.last, joined.has_left)
        scored = None
        if request.score_from and reason == "stop" and scores is not None:
            scored = PromptLogprobs.of(
                request.prompt[request.score_from :], scores, request.logprobs or 0
            )
        return Update(c.ticket, tokens, reason, scored, statistics)

    @property
    def failure(self) -> str | None:
        """The reason why no request can join any more."""
        return self._decoder.failure

    @property
    def has_hung(self) -> bool:
        """Whether the device does not answer."""
        # where it does not, nothing of it can be freed, and only os._exit ends the process
        return getattr(self._decoder, "has_hung", False)

    def cancel(self) -> None:
        """End all requests at the next token."""
        for ticket in tuple(self._joined):
            self.leave(ticket)

    def close(self) -> None:
        """End all requests and wait for their end; the engine then takes others. Safe to call twice."""
        with self._lock:
            closed, self._closed = self._closed, True
        self.cancel()
        while self._joined:
            try:
                self.updates(0.1)  # not longer: another thread may collect the updates instead
            except EngineLost:  # no update will come
                self._joined.clear()
        if not closed:
            self._exclusive.release()

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
