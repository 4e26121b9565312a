"""Batch: requests that decode side by side, joining and leaving between two tokens (continuous batching).

Each draws the tokens that it would draw alone. One thread collects the updates of all; every other call may
come from any thread.
"""

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
    """What came of one request since the last `updates`.

    finish_reason: None while it runs; then "stop" (a stop id, or all scored), "length", "cancelled"
    (`Batch.leave`), or "error" with `error`. scores: of a scoring request that has finished. statistics:
    of any that has.
    """

    ticket: int
    tokens: list[GeneratedToken]
    finish_reason: str | None = None
    scores: PromptLogprobs | None = None
    statistics: Statistics | None = None
    error: str | None = None


@dataclass
class Joined:
    """A request that runs."""

    request: Request
    left: bool = False  # it was told to end
    last: Sequence[int] = ()  # its last token, once there is one


class Batch:
    """The engine's decoder, for many requests at a time (`Engine.batch`); closing it ends them all.

    Up to `max_joined` decode together; a further `join` raises RuntimeError until `updates` has
    told that one ended.
    """

    def __init__(self, exclusive: ExclusiveDecoder, requests: Requests):
        self._exclusive, self._requests = exclusive, requests
        self._joined: dict[int, Joined] = {}  # by ticket
        self._lock, self._collecting = threading.Lock(), threading.Lock()
        self._closed = False
        self._decoder = exclusive.acquire(self)
        self.max_joined = self._decoder.max_joined

    def join(self, prompt_ids: Sequence[int], *, masked: bool = False, **options: Any) -> int:
        """Begin to generate after a prompt; returns the request's ticket.
        `options` as of `Engine.generate_detailed`.

        masked: before each new token is drawn, `allow` must have said which ids are possible.
        """
        return self.begin(self.generation(prompt_ids, masked=masked, **options))

    def score(self, ids: Sequence[int], *, start: int = 1, top: int = 0) -> int:
        """Begin to score ids[start:], as `Engine.logprobs` does; returns the ticket."""
        return self.begin(self.scoring(ids, start=start, top=top))

    def generation(
        self, prompt_ids: Sequence[int], *, masked: bool = False, **options: Any
    ) -> Request:
        """What `join` begins; ValueError for what the engine does not take."""
        return self._requests.generation(prompt_ids, options, masked=masked)

    def scoring(self, ids: Sequence[int], *, start: int = 1, top: int = 0) -> Request:
        """What `score` begins; ValueError for what the engine does not take."""
        return self._requests.scoring(ids, start, top)

    def begin(self, request: Request) -> int:
        """Returns the ticket."""
        with self._lock:
            if self._closed:
                raise ValueError("this batch is closed")
            ticket = self._decoder.join([request])[0]
            self._joined[ticket] = Joined(request)
        return ticket

    def leave(self, ticket: int) -> None:
        """End a request at the next token; its last update says "cancelled", unless it had ended by then."""
        with self._lock:
            if ticket in self._joined:
                self._joined[ticket].left = True
                self._decoder.leave(ticket)

    def allow(self, ticket: int, index: int, mask: np.ndarray) -> None:
        """The ids among which new token `index` (from 0) of a masked request is drawn.

        mask: bit id % 32 of word id // 32, uint32 (ceil(V / 32),). It may come while the pass
        before the draw runs.
        """
        self._decoder.allow(ticket, index, mask)

    def updates(self, timeout_s: float) -> list[Update]:
        """What has come since the last call, in order; waits until there is something, or the time is up."""
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
        reason = finish_reason(request, joined.last, joined.left)
        if not request.score_from or reason != "stop" or scores is None:
            return Update(c.ticket, tokens, reason, None, statistics)
        scored = PromptLogprobs.of(
            request.prompt[request.score_from :], scores, request.logprobs or 0
        )
        return Update(c.ticket, tokens, reason, scored, statistics)

    @property
    def failure(self) -> str | None:
        """Why no request can join any more."""
        return self._decoder.failure

    @property
    def unanswered(self) -> bool:
        """Whether the device does not answer: nothing of it can be freed, and the process ends by os._exit alone."""
        return getattr(self._decoder, "unanswered", False)

    def cancel(self) -> None:
        """End all requests at the next token."""
        for ticket in tuple(self._joined):
            self.leave(ticket)

    def close(self) -> None:
        """End all requests and wait until they have; the engine then takes others. Safe to call twice."""
        with self._lock:
            closed, self._closed = self._closed, True
        self.cancel()
        while self._joined:
            try:
                self.updates(0.1)  # another thread may collect them
            except EngineLost:  # nothing more comes of them
                self._joined.clear()
        if not closed:
            self._exclusive.release()

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
