"""Answers /health while the weights load, so that the port is taken from the start."""

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
POLL_S = 0.05  # for the end of loading
CLIENT_TIMEOUT_S = 0.5


@contextlib.contextmanager
def answer_loading(listening: socket.socket) -> Iterator[None]:
    """Answer every request to a listening socket with 503 and {"status": "loading"} inside."""
    loaded = threading.Event()
    thread = threading.Thread(target=answer_until, args=[listening, loaded], daemon=True)
    listening.settimeout(POLL_S)
    thread.start()
    try:
        yield
    finally:
        loaded.set()
        thread.join()
        listening.settimeout(None)


def answer_until(listening: socket.socket, loaded: threading.Event) -> None:
    while not loaded.is_set():
        # OSError: no client came within POLL_S, or it has left
        with contextlib.suppress(OSError):
            client, _ = listening.accept()
            with client:
                client.settimeout(CLIENT_TIMEOUT_S)
                is_head = client.recv(2**16).startswith(b"HEAD ")
                client.sendall(ANSWER.removesuffix(BODY) if is_head else ANSWER)
                client.shutdown(socket.SHUT_WR)
                # Unread bytes at the close would reset the connection before the answer is read
                while client.recv(2**16):
                    pass
