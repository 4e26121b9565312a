"""A call's requests while they run: cancelled from any thread, read as a stream, ended before the interpreter is.

A thread that returns from C++ while the interpreter shuts down would abort the process, so all
requests end at exit.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Protocol, TypeVar

from .decoder import Collected, Decoder, Request, Scores

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
SIGNAL_POLL_S = 0.1  # longest delay of Ctrl-C while a decoder works
LONGEST_END_S = 10.0  # that the exit waits for a request to end


class Cancelled(RuntimeError):
    """The request was cancelled (`Engine.cancel`, `Engine.close`, or `close` of its stream)
    before it was finished.
    """

    def __init__(self) -> None:
        super().__init__(
            "the request was cancelled before it was finished: its results are incomplete"
        )


class User(Protocol):
    """Who uses a decoder: a `Call` or a `Batch`. Both methods may come from any thread."""

    def cancel(self) -> None:
        """End its requests at the next token."""

    def close(self) -> None:
        """The same, for the last time."""


class ExclusiveDecoder:
    """A decoder that one call, or one batch, uses at a time, in the process that made it.

    lock: held by who uses it, and while the weights load.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._decoder: Decoder | None = None
        self._user: User | None = None  # who holds the lock
        self._process = os.getpid()
        DECODERS.add(self)

    def load(self, load: Callable[[], Decoder]) -> Decoder:
        with self.lock:
            self._decoder = load()
        return self._decoder

    def get(self) -> Decoder:
        """ValueError once it is closed, RuntimeError in a forked child."""
        if self._decoder is None:
            raise ValueError("this engine is closed")
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this engine belongs to process {self._process}: a forked child has none of its threads; make an "
                "engine in the child, or start processes with the method 'spawn'"
            )
        return self._decoder

    def acquire(self, user: User) -> Decoder:
        """Take the lock; RuntimeError while another user holds it."""
        decoder = self.get()
        if not self.lock.acquire(blocking=False):
            raise RuntimeError(
                "the engine is busy with another request; finish or close its stream first"
            )
        self._user = user
        return decoder

    def release(self) -> None:
        # no cycle of references: an engine that is dropped frees its weights at once
        self._user = None
        self.lock.release()

    def cancel(self) -> None:
        user = self._user
        if user is not None:
            user.cancel()

    def close(self) -> None:
        """End what runs and free the weights; from any thread, safe to call twice."""
        decoder, self._decoder = self._decoder, None
        user = self._user
        if user is not None:
            user.close()
        if decoder is not None:
            decoder.close()


class Call:
    """A request that has the decoder to itself: before its start, at work, or over.

    `cancel` may come from any thread, at any time.
    """

    def __init__(self, exclusive: ExclusiveDecoder, request: Request):
        self.exclusive, self.request = exclusive, request
        self.cancelled = self.over = False
        self._decoder: Decoder | None = None  # while it is at work
        self._lock = threading.Lock()

    def finish(self, even_cancelled: bool = False) -> Collected:
        """All that comes of a quiet request, or of a scoring one.

        Cancelled where it was cancelled, or with `even_cancelled` what there was by then.
        """
        *_, last = self._decode()
        if not even_cancelled:
            self.expect_finished()
        return last

    def read(self, read: Callable[[list[int], Scores | None], list[T]]) -> Generator[T, None, None]:
        """What `read` makes of new token ids and their scores, one by one."""
        # nothing runs before the first result is asked for: an iterator that is never advanced
        # must not leave a request running
        with contextlib.closing(self._decode()) as all_news:
            for news in all_news:
                yield from read(news.tokens, news.scores)
        self.expect_finished()

    def cancel(self) -> None:
        with self._lock:
            self.cancelled |= not self.over
            if self._decoder is not None:
                self._decoder.leave_all()

    close = cancel

    def expect_finished(self) -> None:
        if self.cancelled:
            raise Cancelled

    def _decode(self) -> Generator[Collected]:
        """What comes of the request until it has ended; raises its error.

        Where the generator ends before the request, that is told to leave, and waited for.
        """
        decoder, process = self.exclusive.acquire(self), os.getpid()
        try:
            with self._lock:
                self._decoder = decoder
                decoder.join([self.request])
                if self.cancelled:  # before it began
                    decoder.leave_all()
            while decoder.running:
                for news in decoder.collect(SIGNAL_POLL_S):
                    if news.ended is not None and news.ended.error is not None:
                        raise news.ended.error
                    yield news
        finally:
            with self._lock:
                self.over, self._decoder = True, None
            decoder.leave_all()
            while (
                os.getpid() == process and decoder.running
            ):  # a forked child has nobody to wait for
                with contextlib.suppress(Exception):  # what has failed is known by now
                    decoder.collect(SIGNAL_POLL_S)
            self.exclusive.release()


class Stream(Iterator[T_co]):
    """Results of one request, each as soon as it is known.

    `close` ends the request and may be called from any thread; after that `next` raises Cancelled, unless the
    request had finished by then. A stream that is dropped ends its request, too.
    """

    def __init__(self, results: Generator[T_co, None, None], call: Call):
        self._results, self._call = results, call
        self._lock = threading.Lock()  # held while a thread is in the generator
        STREAMS.add(self)

    def __next__(self) -> T_co:
        with self._lock:
            try:
                return next(self._results)
            except StopIteration:
                self._call.expect_finished()
                raise

    def close(self) -> None:
        self._call.cancel()  # a thread that waits in `next` comes back
        with self._lock:
            self._results.close()


STREAMS: weakref.WeakSet[Stream[object]] = weakref.WeakSet()
DECODERS: weakref.WeakSet[ExclusiveDecoder] = weakref.WeakSet()


@atexit.register
def end_all() -> None:
    for stream in tuple(STREAMS):
        stream.close()
    for decoder in tuple(DECODERS):
        decoder.close()
        decoder.lock.acquire(timeout=LONGEST_END_S)  # and nobody gets it any more


def forget_all() -> None:
    """In a forked child: the threads that would end the parent's requests do not exist there."""
    STREAMS.clear()
    DECODERS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget_all)
