"""A worker process of an engine in several processes (processes.py): `python -m
laneformer.engine.cpu.worker`.

Standard input holds pickles of rank 0's: the model, the bytes that its caches may take, then what rank 0 calls
of its decoder: `join`, and for measurements `set_latency` and `probe`. One line of standard output says that the
weights are loaded, or why they are not; the rest of it is beats (links.py).
"""

from __future__ import annotations

import os
import pickle
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NoReturn, TextIO

from ...config import LaneformerConfig
from ...tensors import Tensor
from .decoder import CpuDecoder, Place
from .links import LOADED, Address, beat, connect_all, controlled, shared_file


class Worker(CpuDecoder):
    """The decoder of one process that is not rank 0."""

    def __init__(
        self,
        inbox: Inbox,
        replies: TextIO,
        place: Place,
        address: Address | None,
        source: Callable[[], Mapping[str, Tensor]],
        config: LaneformerConfig,
        dtype: str,
        options: Mapping[str, Any],
    ):
        self._inbox, self._replies = inbox, replies
        if address is not None:
            place = place._replace(
                memory=shared_file(), sockets=connect_all(place.rank, place.processes, address)
            )
        super().__init__(config, source(), dtype, place=place, **options)

    def _settle(self, cache_bytes: int) -> int:
        print(LOADED, self.terms(), file=self._replies, flush=True)
        return self._inbox.get()

    def run(self) -> None:
        while True:
            name, *arguments = self._inbox.get()
            while self.running:  # the last requests end with the same pass as rank 0's
                self.collect(1.0)
            getattr(self, name)(*arguments)


Inbox = queue.SimpleQueue[Any]


def read(messages: BinaryIO, inbox: Inbox) -> None:
    """At their end, rank 0 is gone: whatever runs here is for nobody."""
    while True:
        try:
            inbox.put(pickle.load(messages))
        except (EOFError, OSError, pickle.UnpicklingError):  # the last: in the middle of a message
            os._exit(0)


def work(messages: BinaryIO, replies: TextIO, *model: Any) -> NoReturn:
    """For rank 0, until it ends; `model` are the arguments of Worker, if they do not come
    as the first message.
    """
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=read, args=(messages, inbox), daemon=True).start()
    threading.Thread(target=beat, args=(replies.fileno(),), daemon=True).start()
    worker = None
    try:
        worker = Worker(inbox, replies, *(model or inbox.get()))
        worker.run()
    except Exception as error:
        print(repr(error), file=sys.stderr if worker else replies, flush=True)
    except KeyboardInterrupt:  # of a launcher, which rank 0 gets as well
        pass
    os._exit(1)  # not the interpreter's end, which would wait for threads


def follow(rank: int, processes: int, address: Address, *model: Any) -> NoReturn:
    """`work` for rank 0 at this address, in a process that a launcher has started."""
    place = Place(rank, processes, shared_file(), connect_all(rank, processes, address))
    control = controlled(rank, address)
    work(control.makefile("rb"), control.makefile("w"), place, None, *model)


def main() -> None:
    work(sys.stdin.buffer, sys.stdout)


if __name__ == "__main__":
    main()
