"""While the weights load, somebody answers already: the port is taken, and /health says how far the server is."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

BODY = b'{"status": "loading"}'
ANSWER = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
)
LOOK_S = 0.05  # for the end of loading
PATIENCE_S = 0.5  # with one client


@contextlib.contextmanager
def answer_loading(listening: socket.socket) -> Iterator[None]:
    """Inside, every request to a listening socket gets status 503 and {"status": "loading"}."""
    loaded = threading.Event()
    thread = threading.Thread(target=answer_until, args=[listening, loaded], daemon=True)
    listening.settimeout(LOOK_S)
    thread.start()
    try:
        yield
    finally:
        loaded.set()
        thread.join()
        listening.settimeout(None)


def answer_until(listening: socket.socket, loaded: threading.Event) -> None:
    while not loaded.is_set():
        with contextlib.suppress(OSError):  # nobody came, or who came has left
            client, _ = listening.accept()
            with client:
                client.settimeout(PATIENCE_S)
                is_head = client.recv(2**16).startswith(b"HEAD ")
                client.sendall(ANSWER.removesuffix(BODY) if is_head else ANSWER)
                client.shutdown(socket.SHUT_WR)
                while client.recv(2**16):  # what is unread at the end would reset the connection
                    pass
