"""Run requests with exclusive use of a decoder: streams, cancellation, and the end at exit."""

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
LONGEST_END_S = 10.0  # the exit waits so long for a request to end


class Cancelled(RuntimeError):
    """The request was cancelled before it finished."""

    def __init__(self) -> None:
        super().__init__(
            "the request was cancelled before it was finished: its results are incomplete"
        )


class User(Protocol):
    """A `Call` or a `Batch`; any thread may call both methods."""

    def cancel(self) -> None:
        """End the requests at the next token."""

    def close(self) -> None:
        """End the requests for good."""


class ExclusiveDecoder:
    """A decoder that one call or batch uses at a time, in the process that made it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held by the user, and while the weights load
        self._decoder: Decoder | None = None
        self._user: User | None = None  # who holds the lock
        self._process = os.getpid()
        LIVE_DECODERS.add(self)

    def load(self, load: Callable[[], Decoder]) -> Decoder:
        with self.lock:
            self._decoder = load()
        return self._decoder

    def get(self) -> Decoder:
        """Return the decoder; ValueError once it is closed, RuntimeError in a forked child."""
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
        # break the reference cycle: an engine that is dropped frees its weights at once
        self._user = None
        self.lock.release()

    def cancel(self) -> None:
        user = self._user
        if user is not None:
            user.cancel()

    def close(self) -> None:
        """End running requests and free the weights; from any thread, safe to call twice."""
        decoder, self._decoder = self._decoder, None
        user = self._user
        if user is not None:
            user.close()
        if decoder is not None:
            decoder.close()


class Call:
    """A request that has the decoder to itself; any thread may cancel it."""

    def __init__(self, exclusive: ExclusiveDecoder, request: Request):
        self.exclusive, self.request = exclusive, request
        self.cancelled = self.over = False
        self._decoder: Decoder | None = None  # while it is at work
        self._lock = threading.Lock()

    def finish(self, even_cancelled: bool = False) -> Collected:
        """Run a quiet or scoring request to its end; raise Cancelled unless `even_cancelled`."""
        *_, last = self._decode()
        if not even_cancelled:
            self.expect_finished()
        return last

    def read(self, read: Callable[[list[int], Scores | None], list[T]]) -> Generator[T, None, None]:
        """Yield one by one what `read` makes of new token ids and their scores."""
        # nothing runs before the first result is asked for: an iterator that is never advanced
        # must not leave a request running
        with contextlib.closing(self._decode()) as progress:
            for collected in progress:
                yield from read(collected.tokens, collected.scores)
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
        """Yield the progress of the request until it ends; raise its error."""
        decoder, process = self.exclusive.acquire(self), os.getpid()
        try:
            with self._lock:
                self._decoder = decoder
                decoder.join([self.request])
                if self.cancelled:  # before it began
                    decoder.leave_all()
            while decoder.running:
                for collected in decoder.collect(SIGNAL_POLL_S):
                    if collected.ended is not None and collected.ended.error is not None:
                        raise collected.ended.error
                    yield collected
        finally:
            # where the generator is closed early, end the request and wait for that
            with self._lock:
                self.over, self._decoder = True, None
            decoder.leave_all()
            while (
                os.getpid() == process and decoder.running
            ):  # a forked child has nobody to wait for
                with contextlib.suppress(Exception):  # its failure was raised before
                    decoder.collect(SIGNAL_POLL_S)
            self.exclusive.release()


class Stream(Iterator[T_co]):
    """The results of one request as they come; a stream that is dropped ends its request.

    Any thread may call `close`, which ends the request; `next` then raises Cancelled, unless it had finished.
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
LIVE_DECODERS: weakref.WeakSet[ExclusiveDecoder] = weakref.WeakSet()


@atexit.register
def close_all() -> None:
    # a thread that returns from C++ while the interpreter shuts down would abort the process
    for stream in tuple(STREAMS):
        stream.close()
    for decoder in tuple(LIVE_DECODERS):
        decoder.close()
        decoder.lock.acquire(timeout=LONGEST_END_S)  # never released: no request can start


def forget_all() -> None:
    # a forked child has none of the threads that would end the parent's requests
    STREAMS.clear()
    LIVE_DECODERS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget_all)
