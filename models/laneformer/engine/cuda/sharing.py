"""Requests that join and leave between two passes (passes.py): what `Batch` asks of a decoder.

A thread runs passes while there is a request; it ends with the last one. Callers look only at
what it has published.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..decoder import Collected, Ended, Request, RequestFailed
from .decoding import Decoding
from .passes import PassDecoder


@dataclass
class Joined:
    """A request that has joined. published, ended: of the passes' thread, under the lock."""

    sequence: Decoding
    published: int = 0  # new tokens
    ended: bool = False
    collected: int = 0

    def publish(self) -> None:
        self.published = self.sequence.made
        self.ended = self.sequence.finished

    @property
    def has_news(self) -> bool:
        return self.ended or (self.published > self.collected and not self.sequence.request.quiet)

    def take_news(self, ticket: int) -> Collected:
        s, first, self.collected = self.sequence, self.collected, self.published
        tokens = s.tokens[first : self.published]
        count = s.prompt_length - s.request.score_from if s.scoring else len(tokens)
        whole = s.error is None and not (s.scoring and (s.left or not self.ended))
        scores = s.scores.part(first, count) if s.request.logprobs is not None and whole else None
        error = None if s.error is None else RequestFailed(s.error)
        return Collected(ticket, first, tokens, scores, Ended(s.statistics(), error) if self.ended else None)


class JoinedPasses:
    """`join`, `collect`, `leave` of `Decoder`, for as many requests at a time as a pass has columns."""

    def __init__(self, passes: PassDecoder):
        self.passes, self.max_joined = passes, passes.geometry.mma_columns
        self._changed = threading.Condition()
        self._joined: dict[int, Joined] = {}  # by ticket
        self._tickets = 0
        self._ended: list[dict[str, int]] = []  # their statistics, since none ran
        self._thread: threading.Thread | None = None
        self._failure: str | None = None  # after which the GPU answers nobody in this process

    def join(self, requests: Sequence[Request], alone: bool) -> list[int]:
        """RuntimeError where `max_joined` run, or the GPU has failed. Of those that are alone, some may wait."""
        with self._changed:
            if self._failure is not None:
                raise RuntimeError(
                    f"passes on the GPU have failed, and with them this process: {self._failure}"
                )
            if not alone and len(self._joined) + len(requests) > self.max_joined:
                raise RuntimeError(f"{self.max_joined} requests run; collect the end of one first")
            if not self._joined:
                self.passes.passes, self._ended = 0, []
            context, first = self.passes.config.max_position_embeddings, self._tickets + 1
            self._tickets += len(requests)
            for ticket, request in enumerate(requests, first):
                self._joined[ticket] = Joined(Decoding(request, context))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="laneformer-passes", daemon=True)
                self._thread.start()
            return list(range(first, self._tickets + 1))

    def statistics(self) -> dict[str, int]:
        total = Counter[str]()
        for statistics in self._ended:
            total.update(statistics)
        return {**total, "passes": self.passes.passes}

    def collect(self, timeout_s: float) -> list[Collected]:
        with self._changed:
            self._changed.wait_for(lambda: any(j.has_news for j in self._joined.values()), timeout_s)
            news = [j.take_news(ticket) for ticket, j in self._joined.items() if j.has_news]
            self._ended += [j.sequence.statistics() for j in self._joined.values() if j.ended]
            self._joined = {ticket: j for ticket, j in self._joined.items() if not j.ended}
            return news

    @property
    def running(self) -> int:
        return len(self._joined)

    def leave_all(self) -> None:
        for ticket in tuple(self._joined):
            self.leave(ticket)

    def leave(self, ticket: int) -> None:
        with self._changed:
            if ticket in self._joined:
                self._joined[ticket].sequence.left = True

    def _run(self) -> None:
        while True:
            with self._changed:
                running = [j for j in self._joined.values() if not j.ended]
                if not running:
                    self._thread = None
                    return
            try:
                self.passes.advance([j.sequence for j in running])
            except Exception as error:  # the driver's, or ours: no pass can be trusted any more
                self._failure = f"{type(error).__name__}: {error}"
                for j in running:
                    j.sequence.fail(self._failure)
            with self._changed:
                for j in running:
                    j.publish()
                self._changed.notify_all()
