"""What checkpoints cost: the seconds for which training stood still, and the seconds until the files were whole."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class CheckpointTimes:
    """Seconds since the last `take`; asynchronous saves end in a thread of their own."""

    def __init__(self) -> None:
        self.blocking_s = 0.0
        self.total_s: float | None = None  # of the save that finished last

    @contextmanager
    def blocking(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.blocking_s += time.perf_counter() - started

    @contextmanager
    def saving(self, manager: Any) -> Iterator[None]:
        """Time one save of TorchTitan's manager, whose `save_future` is new afterwards when it goes on by itself."""
        started, before = time.perf_counter(), manager.save_future
        with self.blocking():
            yield

        def finished(_: Any = None) -> None:
            self.total_s = time.perf_counter() - started

        if manager.save_future is None or manager.save_future is before:
            finished()
        else:
            manager.save_future.add_done_callback(finished)

    def take(self) -> tuple[float, float | None]:
        """(blocking seconds, total seconds of a save that has finished or None) since the last call."""
        taken = self.blocking_s, self.total_s
        self.blocking_s, self.total_s = 0.0, None
        return taken
