"""Receive stop requests: SIGTERM, SIGUSR1 (Slurm's warning before the time limit), Ctrl-C, or the file RUN/stop."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

SIGNALS = {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT}
# Slurm signals every process of a step, and torchrun forwards its own: two within seconds are one request
SAME_REQUEST_S = 10.0


class StopSignals:
    """Flags of one process, which the trainer checks at every step; `install` in its main thread."""

    def __init__(self, on_force: Callable[[], None]):
        # the name of the first signal
        self.request: str | None = None
        # by a second signal, or the deadline
        self.forced = False
        self.deadline_s = 300.0
        self.on_force = on_force

    def install(self) -> None:
        # a thread reads Python's wake-up pipe: a handler would never run behind a hanging collective
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._watch, args=(read,), daemon=True, name="stop-signals").start()

    def _watch(self, read: int) -> None:
        first_s = 0.0
        while True:
            number = os.read(read, 1)[0]
            if number not in SIGNALS:
                continue
            if self.request is None:
                first_s, self.request = time.monotonic(), signal.Signals(number).name
                timer = threading.Timer(self.deadline_s, self._force)
                timer.daemon = True
                timer.start()
            elif time.monotonic() - first_s > SAME_REQUEST_S:
                self._force()

    def _force(self) -> None:
        self.forced = True
        self.on_force()


# without cleanup: the main thread may be stuck
WORKER = StopSignals(on_force=lambda: os._exit(1))
