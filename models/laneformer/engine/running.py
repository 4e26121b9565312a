"""A request while it runs: cancelled from any thread, read as a stream, and ended before the interpreter is.

A thread that returns from C++ while the interpreter shuts down would abort the process, so all
requests end at exit.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Generator, Iterator, Sequence
from typing import Protocol, TypeVar

from .decoder import Collected, Decoder, Request

T_co = TypeVar("T_co", covariant=True)
SIGNAL_POLL_S = 0.1  # longest delay of Ctrl-C while a decoder works
LONGEST_END_S = 10.0  # that the exit waits for a request to end


class Cancelled(RuntimeError):
    """The request was cancelled (`Engine.cancel`, `Engine.close`, or `close` of its stream)
    before it was finished.
    """

    def __init__(self) -> None:
        super().__init__("the request was cancelled before it was finished: its results are incomplete")


class Running:
    """The requests of one call: waiting for their start, at work in a decoder, or over.

    `cancel` may come from any thread, at any time.
    """

    def __init__(self, requests: Sequence[Request]):
        self.requests = requests
        self.cancelled = self.over = False
        self._decoder: Decoder | None = None
        self._lock = threading.Lock()

    def news(self, decoder: Decoder) -> Generator[tuple[int, Collected]]:
        """What comes of each request, by its number, until all have ended; the error of one ends them all.

        What still runs when this generator ends is told to leave, and waited for.
        """
        process = os.getpid()
        try:
            with self._lock:
                self._decoder = decoder
                tickets = decoder.join(self.requests, alone=True)
                if self.cancelled:  # before it began
                    decoder.leave_all()
            left = len(tickets)
            while left:
                for news in decoder.collect(SIGNAL_POLL_S):
                    if news.ended is not None:
                        left -= 1
                        if news.ended.error is not None:
                            raise news.ended.error
                    yield tickets.index(news.ticket), news
        finally:
            self.cancel(over=True)
            while os.getpid() == process and decoder.running:  # a forked child has nobody to wait for
                with contextlib.suppress(Exception):  # what has failed is known by now
                    decoder.collect(SIGNAL_POLL_S)

    def cancel(self, over: bool = False) -> None:
        """over: it has ended, and only what is left of it is to end."""
        with self._lock:
            self.over |= over
            self.cancelled |= not self.over
            if self._decoder is not None:
                self._decoder.leave_all()
            if over:
                self._decoder = None

    def expect_finished(self) -> None:
        if self.cancelled:
            raise Cancelled


class Stream(Iterator[T_co]):
    """Results of one request, each as soon as it is known.

    `close` ends the request and may be called from any thread; after that `next` raises Cancelled, unless the
    request had finished by then. A stream that is dropped ends its request, too.
    """

    def __init__(self, results: Generator[T_co, None, None], running: Running):
        self._results, self._running = results, running
        self._lock = threading.Lock()  # held while a thread is in the generator
        STREAMS.add(self)

    def __next__(self) -> T_co:
        with self._lock:
            try:
                return next(self._results)
            except StopIteration:
                self._running.expect_finished()
                raise

    def close(self) -> None:
        self._running.cancel()  # a thread that waits in `next` comes back
        with self._lock:
            self._results.close()


class Owner(Protocol):
    """An engine; the holder of `request_lock` is using it."""

    request_lock: threading.Lock

    def close(self) -> None: ...


STREAMS: weakref.WeakSet[Stream[object]] = weakref.WeakSet()
ENGINES: weakref.WeakSet[Owner] = weakref.WeakSet()


@atexit.register
def end_all() -> None:
    for stream in tuple(STREAMS):
        stream.close()
    for engine in tuple(ENGINES):
        engine.close()
        engine.request_lock.acquire(timeout=LONGEST_END_S)  # and nobody gets it any more


def forget_all() -> None:
    """In a forked child: the threads that would end the parent's requests do not exist there."""
    STREAMS.clear()
    ENGINES.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget_all)
