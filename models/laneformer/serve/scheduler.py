"""Scheduler: requests wait in a bounded queue, one thread decodes them side by side, an event
loop reads their tokens.

Only that thread joins requests to the engine's batch and collects what comes of them. It wakes the loop
once for everything that the loop has not read yet: a busy loop reads longer runs of tokens, never a
longer queue of wake-ups.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from ..engine import Engine, GeneratedToken, PromptLogprobs, Statistics, Update
from ..engine.decoder import CUDA, Request
from .grammar import AnswerGrammar
from .totals import Totals

IDLE_S = 10.0  # without requests
COLLECT_S = 0.005  # longest delay of a join while others decode and none of them has news
RATE_WEIGHT = 0.2  # of the last request in the mean time that one takes
PACE_S = 0.002  # between hand-overs: faster tokens go in runs, so that Python leaves the cores to the engine
LONGEST_RETRY_S = 60
SHARE_TOKENS = 16  # of an answer that tells whether the machine is busy

log = logging.getLogger("laneformer.serve")


class ServingError(RuntimeError):
    """Why the server does not finish a request that is right. status_code: of HTTP."""

    status_code = 503


class Busy(ServingError):
    """The queue is full; in about `retry_after_s` seconds it has room."""

    status_code = 429

    def __init__(self, max_waiting: int, retry_after_s: int):
        super().__init__(
            f"{max_waiting} requests are waiting, which is the limit; try again in {retry_after_s} s"
        )
        self.retry_after_s = retry_after_s


class Stopping(ServingError):
    """The server is shutting down."""


class DeadlineExceeded(ServingError):
    """The request took longer than it may."""


class EngineError(ServingError):
    """The engine could not finish the request."""

    status_code = 500


class Running:
    """A request that waits, runs, or has ended: `async for tokens in running` yields the
    tokens that have come.

    The iteration raises DeadlineExceeded, Stopping, EngineError or ValueError where one of these ended it,
    and just ends after `cancel`. finish_reason and statistics are those of `Update`, None before the end;
    times are of time.monotonic(). All methods are for the event loop's thread.
    """

    def __init__(self, scheduler: Scheduler, request: Request, grammar: AnswerGrammar | None):
        self.request, self.grammar = request, grammar
        self.submitted_s = time.monotonic()
        self.started_s = self.first_token_s = self.last_token_s = None  # type: float | None
        # the latter: of this process at the first token
        self.generated_tokens, self.processor_s = 0, 0.0
        self.finish_reason: str | None = None
        self.statistics: Statistics | None = None
        self.scores: PromptLogprobs | None = None
        self.error: Exception | None = None
        self.ticket: int | None = None  # this and `left` under the scheduler's lock
        self.left = False
        self._scheduler = scheduler
        self._tokens: list[GeneratedToken] = []
        self._news = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None

    def __aiter__(self) -> Running:
        return self

    async def __anext__(self) -> list[GeneratedToken]:
        while not self._tokens:
            if self.finish_reason is not None:
                if self.error is not None:
                    raise self.error
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        tokens, self._tokens = self._tokens, []
        return tokens

    def cancel(self, because: Exception | None = None) -> None:
        """End it at the next token, or its waiting now; nothing where it has ended."""
        if self.finish_reason is None:
            self.error = self.error or because
            self._scheduler._leave(self)

    def _receive(self, update: Update) -> None:
        self._tokens += update.tokens
        if update.finish_reason is not None:
            self.finish_reason = update.finish_reason
            self._scheduler.totals.ended[self.finish_reason] += 1  # those that only waited, too
            self.statistics, self.scores = update.statistics, update.scores
            if update.finish_reason == "error":
                self.error = self.error or EngineError(
                    f"the engine could not finish the request: {update.error}"
                )
            elif update.finish_reason != "cancelled":
                self.error = None  # it ended by itself before it was cancelled
            if self._deadline is not None:
                self._deadline.cancel()
        self._news.set()

    # on the engine's thread

    def _count_tokens(self, tokens: int, now_s: float) -> None:
        totals = self._scheduler.totals
        if self.last_token_s is None:
            self.first_token_s, self.processor_s = now_s, time.process_time()
            totals.first_token.observe(now_s - self.submitted_s)
        else:
            totals.gap.observe(now_s - self.last_token_s)
        self.last_token_s = now_s
        self.generated_tokens += tokens
        totals.generated_tokens += tokens

    def _count_end(self, statistics: Statistics) -> None:
        totals, engine = self._scheduler.totals, self._scheduler.engine
        totals.prompt_tokens += len(self.request.prompt)
        totals.reused_tokens += statistics.reused_tokens
        totals.proposed_tokens += statistics.proposed_tokens
        totals.accepted_tokens += statistics.accepted_tokens
        first_s, last_s = self.first_token_s or 0.0, self.last_token_s or 0.0
        if last_s <= first_s:
            return
        decode_s = last_s - first_s
        totals.tokens_per_s = (self.generated_tokens - 1) / decode_s
        totals.passes_per_s = totals.tokens_per_s - statistics.accepted_tokens / decode_s
        # threads that wait for masks, or short answers, say nothing of the machine
        if self.generated_tokens >= SHARE_TOKENS and not self.request.masked and engine.isa != CUDA:
            most_s = (time.monotonic() - first_s) * engine.threads
            totals.processor_share = min(1.0, (time.process_time() - self.processor_s) / most_s)


class Scheduler:
    """Runs requests on an engine, in the order of their submission; `close` gives the engine back.

    Up to `max_joined` decode side by side, `max_waiting` wait. deadline_s: of a request, its waiting included.
    when_idle: called on the engine's thread, once each time that nobody has asked for IDLE_S.
    """

    def __init__(
        self,
        engine: Engine,
        max_waiting: int = 16,
        deadline_s: float | None = None,
        when_idle: Callable[[], None] = lambda: None,
    ):
        """RuntimeError while the engine runs a request of somebody else."""
        self._when_idle = when_idle
        self.engine, self.max_waiting, self.deadline_s = engine, max_waiting, deadline_s
        self.batch = engine.batch()
        self.max_joined = self.batch.max_joined
        self.totals = Totals()
        self.failure: str | None = None  # of the thread: nothing runs any more
        self.unanswered = False  # as the device does not answer any more
        self.stopping = False  # takes no more answers
        self.waiting: deque[Running] = deque()
        self.running: set[Running] = set()  # they left the queue and have not ended
        self._joined: dict[int, Running] = {}  # by ticket; of the engine's thread alone
        self._closing = False
        self._changed = threading.Condition(threading.Lock())
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: list[tuple[Running, Update]] = []  # that the loop has not read yet
        self._handed_s = 0.0  # when there was news
        self._request_s = 1.0  # mean time that a request takes
        self._thread = threading.Thread(target=self._serve, name="laneformer-engine", daemon=True)
        self._thread.start()

    def submit(
        self, request: Request, grammar: AnswerGrammar | None = None, admitted: bool = False
    ) -> Running:
        """Queue a request of `batch`; Busy, Stopping, EngineError. On a loop.

        admitted: it belongs to an answer that has been let in, so there is room for it.
        """
        self._loop = asyncio.get_running_loop()
        running = Running(self, request, grammar)
        with self._changed:
            if self.failure is not None:
                raise EngineError(self.failure)
            if self._closing or (self.stopping and not admitted):
                raise Stopping("the server is shutting down and takes no more requests")
            if (
                not admitted
                and len(self.waiting) + len(self.running) >= self.max_waiting + self.max_joined
            ):
                one_ends_s = math.ceil(self._request_s / self.max_joined)
                raise Busy(self.max_waiting, max(1, min(LONGEST_RETRY_S, one_ends_s)))
            self.waiting.append(running)
            self._changed.notify()
        if self.deadline_s is not None:
            late = DeadlineExceeded(
                f"the request was not finished within its deadline of {self.deadline_s:g} s"
            )
            running._deadline = self._loop.call_later(self.deadline_s, running.cancel, late)
        return running

    async def stop(self, grace_s: float) -> None:
        """Take no more answers, let those that run or wait end for `grace_s`, then cancel them."""
        self.stopping = True
        end_s = time.monotonic() + grace_s
        while (self.waiting or self.running) and time.monotonic() < end_s:
            await asyncio.sleep(0.02)
        for running in [*self.waiting, *self.running]:
            running.cancel(Stopping("the server is shutting down; it has cancelled the request"))

    def close(self) -> None:
        """End everything with an error and wait for the thread; the engine then takes other requests."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _leave(self, running: Running) -> None:
        with self._changed:
            running.left = True
            if running.ticket is not None:
                self.batch.leave(running.ticket)
            elif running in self.waiting:
                self.waiting.remove(running)
                running._receive(Update(-1, [], "cancelled"))

    # The engine's thread

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._admit()
                self._hand_over(self._collect())
                if self.batch.failure is not None:
                    raise RuntimeError(self.batch.failure)
        except BaseException as error:
            log.exception("the engine's thread has failed")
            self.failure = f"the engine's thread has failed: {error!r}"
            self.unanswered = self.batch.unanswered
        with self._changed:
            self._closing = True
            left = [*self.waiting, *self.running]
            self.waiting.clear()
            self.running.clear()
        self._hand_over(
            [
                (running, Update(-1, [], "error", error=self.failure or "it is closed"))
                for running in left
            ]
        )
        self.batch.close()

    def _admit(self) -> None:
        """Admit requests from the head of the queue while there is room; blocks while none is running or waiting."""
        with self._changed:
            idle = not self._changed.wait_for(self._has_work, IDLE_S)
        if idle:
            self._when_idle()
        with self._changed:
            self._changed.wait_for(self._has_work)
            room = self.max_joined - len(self.running)
            first = [self.waiting.popleft() for _ in range(min(room, len(self.waiting)))]
            self.running.update(first)
        for running in first:
            self._join(running)

    def _has_work(self) -> bool:
        return bool(self.waiting or self.running or self._closing)

    def _join(self, running: Running) -> None:
        ticket = self.batch.begin(running.request)
        running.started_s = time.monotonic()
        self._joined[ticket] = running
        with self._changed:
            running.ticket = ticket
            if running.left:
                self.batch.leave(ticket)
        self._allow(running, [])

    def _collect(self) -> list[tuple[Running, Update]]:
        # a draw that waits for a mask cannot
        if not any(running.grammar for running in self._joined.values()):
            time.sleep(max(0.0, self._handed_s + PACE_S - time.monotonic()))
        news = []
        for update in self.batch.updates(COLLECT_S):
            running, now_s = self._joined[update.ticket], time.monotonic()
            if update.tokens:
                running._count_tokens(len(update.tokens), now_s)
            if update.finish_reason is not None:
                running._count_end(update.statistics or Statistics())
                self._request_s += RATE_WEIGHT * (
                    now_s - (running.started_s or now_s) - self._request_s
                )
                del self._joined[update.ticket]
                with self._changed:
                    self.running.discard(running)
            elif update.tokens:
                self._allow(running, update.tokens)
            news.append((running, update))
        return news

    def _allow(self, running: Running, tokens: Sequence[GeneratedToken]) -> None:
        """The mask of the next token, where a grammar says what it may be."""
        if running.grammar is None:
            return
        assert running.ticket is not None
        try:
            for token in tokens:
                running.grammar.accept(token.id)
            mask = running.grammar.mask(running.generated_tokens)
            self.batch.allow(running.ticket, running.generated_tokens, mask)
        except Exception as error:
            log.exception("the grammar of a request has failed")
            running.error = EngineError(f"the grammar of the request has failed: {error}")
            self.batch.leave(running.ticket)

    def _hand_over(self, news: list[tuple[Running, Update]]) -> None:
        """Give news to the event loop, with one wake-up for all that it has not read yet."""
        if not news:
            return
        self._handed_s = time.monotonic()
        with self._changed:
            first = not self._news
            self._news += news
        if first and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        """On the event loop's thread."""
        with self._changed:
            news, self._news = self._news, []
        for running, update in news:
            running._receive(update)
