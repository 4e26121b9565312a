"""A worker process of an engine in several processes (processes.py): `python -m laneformer.engine.cpu.worker`.

Standard input holds pickles of rank 0's: the model, the bytes that its caches may take, then one request after another.
One line of standard output says that the weights are loaded, or why they are not.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ...config import LaneformerConfig
from ...tensors import Tensor
from ..running import wait
from .decoder import CpuDecoder, Place
from .links import Address, connect_all, shared_file


class Worker(CpuDecoder):
    """The decoder of one process that is not rank 0."""

    def __init__(
        self,
        inbox: Inbox,
        place: Place,
        address: Address | None,
        source: Callable[[], Mapping[str, Tensor]],
        config: LaneformerConfig,
        dtype: str,
        options: Mapping[str, Any],
    ):
        self._inbox = inbox
        if address is not None:
            place = place._replace(memory=shared_file(), sockets=connect_all(place.rank, place.processes, address))
        super().__init__(config, source(), dtype, place=place, **options)

    def _settle(self, cache_bytes: int) -> int:
        print(flush=True)
        return self._inbox.get()

    def run(self) -> None:
        while True:
            request = self._inbox.get()
            with contextlib.suppress(OverflowError):  # which rank 0 has found, too
                wait(self)  # the last one ends with the same pass as rank 0's
            self.start(request)


Inbox = queue.SimpleQueue[Any]


def read(inbox: Inbox) -> None:
    """At the end of the pipe, rank 0 is gone: whatever runs here is for nobody."""
    while True:
        try:
            inbox.put(pickle.load(sys.stdin.buffer))
        except EOFError:
            os._exit(0)


def main() -> None:
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=read, args=(inbox,), daemon=True).start()
    worker = None
    try:
        worker = Worker(inbox, *inbox.get())
        worker.run()
    except Exception as error:
        print(repr(error), file=sys.stderr if worker else sys.stdout, flush=True)
    os._exit(1)  # not the interpreter's end, which would wait for threads


if __name__ == "__main__":
    main()
