"""Requests that have the GPUs to themselves, one after the other, on `start` and `poll` of their decoder."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..decoder import Collected, Ended, Request, RequestFailed, Scores


class Alone:
    """The methods are those of `Decoder`.

    What `start` and `poll` raise as RequestFailed is the end of that request alone.
    """

    def __init__(self, decoder: Any):
        self._decoder = decoder
        self._requests: dict[
            int, Request
        ] = {}  # by ticket, whose end has not been collected; the first one runs
        self._failure: RequestFailed | None = None  # of its start
        self._tickets = self._collected = 0
        self._total = Counter[str]()
        self._left = False
        self._has_joined = threading.Condition()

    @property
    def running(self) -> int:
        return len(self._requests)

    def join(self, requests: Sequence[Request], alone: bool) -> list[int]:
        with self._has_joined:
            if self._requests:
                raise RuntimeError(
                    "this decoder runs one request at a time; collect the end of the last one first"
                )
            self._left, self._total = False, Counter()
            self._start(requests[0])
            tickets = list(range(self._tickets, self._tickets + len(requests)))
            self._tickets += len(requests)
            self._requests = dict(zip(tickets, requests, strict=True))
            self._has_joined.notify_all()
            return tickets

    def _start(self, request: Request) -> None:
        self._failure, self._collected = None, 0
        try:
            self._decoder.start(request)
        except RequestFailed as error:
            self._failure = error

    def collect(self, timeout_s: float) -> list[Collected]:
        with self._has_joined:
            if not self._has_joined.wait_for(lambda: self._requests, timeout_s):
                return []
            ticket, request = next(iter(self._requests.items()))
        first, scoring = self._collected, request.score_from > 0
        try:
            if self._failure is not None:
                raise self._failure
            tokens, finished = self._decoder.poll(first, timeout_s, request.quiet or scoring)
        except RequestFailed as error:
            return self._end(ticket, Ended(self._figures(), error), [], None)
        except Exception:
            self._requests = {}
            raise
        if not finished and (not tokens or request.quiet):
            return []
        count = len(request.prompt) - request.score_from if scoring else len(tokens)
        scores = None if request.logprobs is None else self._decoder.scores(first, count)
        if finished:
            logits = self._decoder.logits() if request.keep_logits else None
            return self._end(ticket, Ended(self._figures(), None, logits), tokens, scores)
        self._collected += len(tokens)
        return [Collected(ticket, first, tokens, scores)]

    def _end(self, ticket: int, ended: Ended, tokens: list[int], scores: Scores | None) -> list[Collected]:
        """The last news of a request; the next one begins, or where all are to leave they end with it."""
        with self._has_joined:
            news = [Collected(ticket, self._collected, tokens, scores, ended)]
            del self._requests[ticket]
            if self._left:
                nothing = Ended({})
                news += [Collected(waiting, 0, [], None, nothing) for waiting in self._requests]
                self._requests = {}
            elif self._requests:
                self._start(next(iter(self._requests.values())))
        return news

    def _figures(self) -> dict[str, int]:
        figures = self._decoder.figures()
        self._total.update(figures)
        return figures

    def leave(self, ticket: int) -> None:
        if ticket in self._requests:
            self.leave_all()

    def leave_all(self) -> None:
        with self._has_joined:
            if self._requests:
                self._left = True
                self._decoder.cancel()

    def statistics(self) -> dict[str, int]:
        return dict(self._total)
