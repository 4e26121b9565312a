"""While the weights load, somebody answers already: the port is taken, and /health says how far the server is."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType

BODY = b'{"status": "loading"}'
ANSWER = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
)
LOOK_S = 0.05  # for the end of loading
PATIENCE_S = 0.5  # with one client


class Loading:
    """A context in which every request to a listening socket gets status 503 and {"status": "loading"}."""

    def __init__(self, listening: socket.socket):
        self.listening, self.loaded = listening, threading.Event()
        self.thread = threading.Thread(target=self._answer, daemon=True)

    def __enter__(self) -> Loading:
        self.listening.settimeout(LOOK_S)
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.loaded.set()
        self.thread.join()
        self.listening.settimeout(None)

    def _answer(self) -> None:
        while not self.loaded.is_set():
            with contextlib.suppress(OSError):  # nobody came, or who came has left
                client, _ = self.listening.accept()
                with client:
                    client.settimeout(PATIENCE_S)
                    is_head = client.recv(2**16).startswith(b"HEAD ")
                    client.sendall(ANSWER.removesuffix(BODY) if is_head else ANSWER)
                    client.shutdown(socket.SHUT_WR)
                    while client.recv(2**16):  # what is unread at the end would reset the connection
                        pass
