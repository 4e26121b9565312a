"""A worker process of an engine in several processes (processes.py): `python -m
laneformer.engine.cpu.worker`.

Standard input holds pickles of rank 0's: the model, then the names of what the worker is to call of its decoder,
with arguments: `work`, and for measurements `set_latency` and `probe`. One line of standard output says that the
weights are loaded, or why they are not; the rest of it is beats.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, TextIO

from ...config import LaneformerConfig
from ...tensors import Tensor
from .decoder import CpuDecoder, Place

BEAT_S = 0.5
BEAT = b"\0"  # never part of a reply
LOADED = "loaded"  # the reply of a worker that has its weights; any other says why it has not


class Worker(CpuDecoder):
    """The decoder of one process that is not rank 0."""

    def __init__(
        self,
        replies: TextIO,
        place: Place,
        source: Callable[[], Mapping[str, Tensor]],
        config: LaneformerConfig,
        dtype: str,
        options: Mapping[str, Any],
    ):
        self._replies = replies
        super().__init__(config, source(), dtype, place=place, **options)

    def _settle(self) -> None:
        print(LOADED, file=self._replies, flush=True)


Inbox = queue.SimpleQueue[Any]


def read(messages: BinaryIO, inbox: Inbox) -> None:
    """At their end, rank 0 is gone: whatever runs here is for nobody."""
    while True:
        try:
            inbox.put(pickle.load(messages))
        except (EOFError, OSError, pickle.UnpicklingError):  # the last: in the middle of a message
            os._exit(0)


def beat(replies: int) -> None:
    """Signs of life, from a thread that does nothing else: a process that computes for long is not hung."""
    with contextlib.suppress(OSError):  # rank 0 is gone; `read` ends the process
        while True:
            os.write(replies, BEAT)
            time.sleep(BEAT_S)


def main() -> None:
    """For rank 0, until it ends."""
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=read, args=(sys.stdin.buffer, inbox), daemon=True).start()
    threading.Thread(target=beat, args=(sys.stdout.fileno(),), daemon=True).start()
    worker = None
    try:
        worker = Worker(sys.stdout, *inbox.get())
        while True:
            name, *arguments = inbox.get()
            getattr(worker, name)(*arguments)
    except Exception as error:
        print(repr(error), file=sys.stderr if worker else sys.stdout, flush=True)
    os._exit(1)  # not the interpreter's end, which would wait for threads


if __name__ == "__main__":
    main()
