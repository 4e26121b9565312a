"""`join` for a decoder that runs one request at a time: what `Batch` asks of a decoder,
on `start` and `poll`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from .decoder import Collected, Request, RequestFailed

if TYPE_CHECKING:
    Base = Any  # a decoder, with its own methods
else:
    Base = object


class OneAtATime(Base):
    """Mixed into a decoder; the methods are those of `Decoder` for joined requests.

    What `start` and `poll` raise as RequestFailed is the end of that request alone.
    """

    @property
    def max_joined(self) -> int:
        return 1

    def _prepare_joined(self) -> None:
        """To be called once, at the decoder's start."""
        self._joined: Request | None = None
        self._failure: RequestFailed | None = None  # of the joined request's start
        self._ticket = self._collected = 0
        self._has_joined = threading.Condition()

    def join(self, request: Request) -> int:
        with self._has_joined:
            if self._joined is not None:
                raise RuntimeError(
                    "this decoder runs one request at a time; collect the end of the last one first"
                )
            self._failure = None
            try:
                self.start(request)
            except RequestFailed as error:
                self._failure = error
            self._joined, self._collected, self._ticket = request, 0, self._ticket + 1
            self._has_joined.notify_all()
            return self._ticket

    def collect(self, timeout_s: float) -> list[Collected]:
        with self._has_joined:
            if not self._has_joined.wait_for(lambda: self._joined is not None, timeout_s):
                return []
            request, ticket, first = self._joined, self._ticket, self._collected
        assert request is not None
        scoring = request.score_from > 0
        try:
            if self._failure is not None:
                raise self._failure
            tokens, finished = self.poll(first, timeout_s, scoring)
        except RequestFailed as error:
            return self._ended(Collected(ticket, first, [], None, self.statistics(), str(error)))
        if not tokens and not finished:
            return []
        count = len(request.prompts[0]) - request.score_from if scoring else len(tokens)
        scores = (
            self.scores(first, count) if request.logprobs is not None and (finished or not scoring) else None
        )
        self._collected = first + len(tokens)
        if not finished:
            return [Collected(ticket, first, tokens, scores)]
        return self._ended(Collected(ticket, first, tokens, scores, self.statistics()))

    def _ended(self, last: Collected) -> list[Collected]:
        with self._has_joined:
            self._joined = None
        return [last]

    def leave(self, ticket: int) -> None:
        with self._has_joined:
            if self._joined is not None and self._ticket == ticket:
                self.cancel()

    def allow(self, ticket: int, index: int, mask: np.ndarray) -> None:
        raise AssertionError("`check` refuses masked requests")
