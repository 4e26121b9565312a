"""Requests wait in a bounded queue, one thread decodes them, an event loop reads their tokens.

A request joins the engine as soon as fewer than `max_joined` are with it. What runs in a pass, and
how prompts and new tokens share it, is not decided here: that batching is `Schedule` in
engine/schedule.
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

IDLE_S = 10.0  # without requests, until when_idle is called
COLLECT_S = 0.005  # longest delay of a new request while others decode
MEAN_WEIGHT = 0.2  # of the last request, in the mean time that a request takes
# Between deliveries: faster tokens are delivered in runs, so that the engine keeps its cores
PACE_S = 0.002
LONGEST_RETRY_S = 60
MIN_SHARE_TOKENS = 16  # a shorter answer does not tell whether the machine is busy

log = logging.getLogger("laneformer.serve")


class ServingError(RuntimeError):
    """Why the server does not finish a correct request; `status_code` is of HTTP."""

    status_code = 503


class Busy(ServingError):
    """The queue is full; in about `retry_after_s` seconds it has room."""

    status_code = 429

    def __init__(self, max_waiting: int, retry_after_s: int):
        super().__init__(
            f"{max_waiting} requests are waiting, which is the limit; try again in {retry_after_s} s"
        )
        self.retry_after_s = retry_after_s


class EngineError(ServingError):
    """The engine could not finish the request."""

    status_code = 500


class Running:
    """A request of the scheduler, from `submit` on: it waits, runs, or has ended.

    Iterate over its tokens on the event loop.
    """

    def __init__(self, scheduler: Scheduler, request: Request, grammar: AnswerGrammar | None):
        self.request = request
        self.grammar = grammar
        self.submitted_s = time.monotonic()
        self.started_s = self.first_token_s = self.last_token_s = None  # type: float | None
        self.generated_tokens = 0
        self.processor_s = 0.0  # of this process, at the first token
        # As in `Update`; None before the end
        self.finish_reason: str | None = None
        self.statistics: Statistics | None = None
        self.scores: PromptLogprobs | None = None
        self.error: Exception | None = None
        # Access these two under the scheduler's lock
        self.ticket: int | None = None
        self.left = False
        self._scheduler = scheduler
        self._tokens: list[GeneratedToken] = []
        self._wake_event = asyncio.Event()
        # Cancels the request; set by Scheduler.submit
        self._deadline: asyncio.TimerHandle | None = None

    def __aiter__(self) -> Running:
        return self

    async def __anext__(self) -> list[GeneratedToken]:
        # Tokens that came before the end are delivered before its error is raised
        while not self._tokens:
            if self.finish_reason is not None:
                if self.error is not None:
                    raise self.error
                raise StopAsyncIteration
            self._wake_event.clear()
            await self._wake_event.wait()
        tokens = self._tokens
        self._tokens = []
        return tokens

    def cancel(self, because: Exception | None = None) -> None:
        """End the request at its next token, or its waiting at once."""
        if self.finish_reason is None:
            self.error = self.error or because
            self._scheduler._leave(self)

    def _receive(self, update: Update) -> None:
        self._tokens += update.tokens
        if update.finish_reason is not None:
            self.finish_reason = update.finish_reason
            # Count here, not on the engine's thread, to include requests that never ran
            self._scheduler.totals.ended[self.finish_reason] += 1
            self.statistics = update.statistics
            self.scores = update.scores
            if update.finish_reason == "error":
                self.error = self.error or EngineError(
                    f"the engine could not finish the request: {update.error}"
                )
            elif update.finish_reason != "cancelled":
                # It ended by itself before the cancellation reached the engine
                self.error = None
            if self._deadline is not None:
                self._deadline.cancel()
        self._wake_event.set()

    # The methods below run on the engine's thread

    def _count_tokens(self, tokens: int, now_s: float) -> None:
        totals = self._scheduler.totals
        if self.last_token_s is None:
            self.first_token_s = now_s
            self.processor_s = time.process_time()
            totals.first_token.observe(now_s - self.submitted_s)
        else:
            totals.gap.observe(now_s - self.last_token_s)
        self.last_token_s = now_s
        self.generated_tokens += tokens
        totals.generated_tokens += tokens

    def _count_end(self, statistics: Statistics) -> None:
        totals = self._scheduler.totals
        engine = self._scheduler.engine
        totals.prompt_tokens += len(self.request.prompt)
        totals.reused_tokens += statistics.reused_tokens
        totals.proposed_tokens += statistics.proposed_tokens
        totals.accepted_tokens += statistics.accepted_tokens
        first_s = self.first_token_s or 0.0
        last_s = self.last_token_s or 0.0
        if last_s <= first_s:
            return
        decode_s = last_s - first_s
        totals.tokens_per_s = (self.generated_tokens - 1) / decode_s
        totals.passes_per_s = totals.tokens_per_s - statistics.accepted_tokens / decode_s
        # Threads that wait for masks are idle as well, so masked requests do not count
        if (
            self.generated_tokens >= MIN_SHARE_TOKENS
            and not self.request.masked
            and engine.isa != CUDA
        ):
            most_s = (time.monotonic() - first_s) * engine.threads
            totals.processor_share = min(1.0, (time.process_time() - self.processor_s) / most_s)


class Scheduler:
    """Lets requests join an engine in the order of their submission (batching: engine/schedule)."""

    def __init__(
        self,
        engine: Engine,
        max_waiting: int = 16,
        deadline_s: float | None = None,  # of a request, its waiting included
        when_idle: Callable[[], None] = lambda: None,  # on the engine's thread, after each IDLE_S
    ):
        """Start the engine's thread; RuntimeError while the engine is in use."""
        self.when_idle = [when_idle]
        self.engine = engine
        self.max_waiting = max_waiting
        self.deadline_s = deadline_s
        self.batch = engine.batch()
        self.max_joined = self.batch.max_joined
        self.totals = Totals()
        self.failure: str | None = None  # of the thread: nothing runs afterwards
        self.has_hung = False  # the device does not answer: the cause of that failure
        self.stopping = False  # no new answers are accepted
        self.waiting: deque[Running] = deque()
        self.running: set[Running] = set()  # out of the queue, and not ended
        self._joined: dict[int, Running] = {}  # by ticket; only the engine's thread uses it
        self._closing = False
        self._changed = threading.Condition(threading.Lock())
        self._loop: asyncio.AbstractEventLoop | None = None
        self._undelivered: list[tuple[Running, Update]] = []  # not read by the loop yet
        self._delivered_s = 0.0
        self._request_s = 1.0  # mean time that a request takes
        self._thread = threading.Thread(target=self._serve, name="laneformer-engine", daemon=True)
        self._thread.start()

    def submit(
        self, request: Request, grammar: AnswerGrammar | None = None, admitted: bool = False
    ) -> Running:
        """Queue a request of `batch`, on an event loop; Busy, ServingError or EngineError."""
        self._loop = asyncio.get_running_loop()
        running = Running(self, request, grammar)
        with self._changed:
            if self.failure is not None:
                raise EngineError(self.failure)
            if self._closing or (self.stopping and not admitted):
                raise ServingError("the server is shutting down and takes no more requests")
            accepted = len(self.waiting) + len(self.running)
            # An admitted request belongs to an answer for which there was room
            if not admitted and accepted >= self.max_waiting + self.max_joined:
                one_ends_s = math.ceil(self._request_s / self.max_joined)
                raise Busy(self.max_waiting, max(1, min(LONGEST_RETRY_S, one_ends_s)))
            self.waiting.append(running)
            self._changed.notify()
        if self.deadline_s is not None:
            timeout = ServingError(
                f"the request was not finished within its deadline of {self.deadline_s:g} s"
            )
            running._deadline = self._loop.call_later(self.deadline_s, running.cancel, timeout)
        return running

    async def stop(self, grace_s: float) -> None:
        """Accept no more answers, let others end for `grace_s`, then cancel them."""
        self.stopping = True
        end_s = time.monotonic() + grace_s
        while (self.waiting or self.running) and time.monotonic() < end_s:
            await asyncio.sleep(0.02)
        for running in [*self.waiting, *self.running]:
            running.cancel(
                ServingError("the server is shutting down; it has cancelled the request")
            )

    def close(self) -> None:
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

    # The methods below run on the engine's thread

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
            self.has_hung = self.batch.has_hung
        with self._changed:
            self._closing = True
            # submit raises from now on, so this list is complete
            unfinished = [*self.waiting, *self.running]
            self.waiting.clear()
            self.running.clear()
        self._hand_over(
            [
                (running, Update(-1, [], "error", error=self.failure or "it is closed"))
                for running in unfinished
            ]
        )
        self.batch.close()

    def _admit(self) -> None:
        """Take requests from the queue while there is room; block while there is nothing to do."""
        with self._changed:
            # Call it without the lock: it may take long, and submit must not wait
            idle = not self._changed.wait_for(self._has_work, IDLE_S)
        if idle:
            for task in self.when_idle:
                task()
        with self._changed:
            self._changed.wait_for(self._has_work)
            room = self.max_joined - len(self.running)
            admitted = [self.waiting.popleft() for _ in range(min(room, len(self.waiting)))]
            self.running.update(admitted)
        for running in admitted:
            self._join(running)

    def _has_work(self) -> bool:
        return bool(self.waiting or self.running or self._closing)

    def _join(self, running: Running) -> None:
        # The request may be cancelled before its ticket is known: `left` remembers it
        ticket = self.batch.begin(running.request)
        running.started_s = time.monotonic()
        self._joined[ticket] = running
        with self._changed:
            running.ticket = ticket
            if running.left:
                self.batch.leave(ticket)
        self._allow(running, [])

    def _collect(self) -> list[tuple[Running, Update]]:
        # Do not delay masks: the next token waits for them
        if not any(running.grammar for running in self._joined.values()):
            time.sleep(max(0.0, self._delivered_s + PACE_S - time.monotonic()))
        updates = []
        for update in self.batch.updates(COLLECT_S):
            running = self._joined[update.ticket]
            now_s = time.monotonic()
            if update.tokens:
                running._count_tokens(len(update.tokens), now_s)
            if update.finish_reason is not None:
                running._count_end(update.statistics or Statistics())
                # A moving average, from which a full queue estimates Retry-After
                self._request_s += MEAN_WEIGHT * (
                    now_s - (running.started_s or now_s) - self._request_s
                )
                del self._joined[update.ticket]
                with self._changed:
                    self.running.discard(running)
            elif update.tokens:
                self._allow(running, update.tokens)
            updates.append((running, update))
        return updates

    def _allow(self, running: Running, tokens: Sequence[GeneratedToken]) -> None:
        """Set the mask of the next token, where a grammar restricts it."""
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

    def _hand_over(self, updates: list[tuple[Running, Update]]) -> None:
        if not updates:
            return
        self._delivered_s = time.monotonic()
        # One wake-up for everything that the loop has not read: a busy loop then reads longer runs
        # of tokens, not a longer queue of wake-ups
        with self._changed:
            is_first = not self._undelivered
            self._undelivered += updates
        if is_first and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._changed:
            updates = self._undelivered
            self._undelivered = []
        for running, update in updates:
            running._receive(update)
