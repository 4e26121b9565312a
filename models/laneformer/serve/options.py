"""What a server may be told, validated in one place."""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
import sys
from dataclasses import dataclass

from ..engine.options import MAX_DRAFT_TOKENS, in_range

RANGES: dict[str, tuple[type, float, float]] = {
    "port": (int, 0, 65535),
    "max_waiting": (int, 0, 10_000),
    "deadline_s": (float, 0.001, 1e9),
    "grace_s": (float, 0, 1e6),
    "max_body_bytes": (int, 1, 2**40),
    "keep_alive_s": (float, 0.01, 1e6),
    "speculate": (int, 0, MAX_DRAFT_TOKENS),
    "reasoning_budget": (int, -1, 2**31),
    "link_us": (float, 0, 1e6),
}


@dataclass(frozen=True)
class ServerOptions:
    """Options of `run` and `create_app`. ValueError for invalid values.

    model: the name that clients see. host, port: where to listen; port 0 is a free one. api_key: what clients
    must send as "Authorization: Bearer KEY"; default: the environment variable LANEFORMER_API_KEY, without
    one nobody is asked. host_names: names beside localhost and addresses by which browsers may call the
    server. allowed_origins: of pages of other sites that may use it, as https://notes.example; "*" is all of them.
    max_waiting: requests beyond those that decode; a further one gets status 429. deadline_s: longest
    time of a request, its waiting included. grace_s: after SIGTERM, for requests that run. max_body_bytes: of
    one request. keep_alive_s: longest silence of a stream before a comment is sent. speculate: most draft tokens
    of requests that do not say; 0: none. reasoning_budget: most tokens of their reasoning; -1: any number.
    strict: refuse unknown fields and those without effect, instead of naming them in the header `warnings`.
    link_us: latency put between lanes of different threads, and measured at the start; 0: none.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    host_names: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_waiting: int = 16
    deadline_s: float = 600.0
    grace_s: float = 10.0
    max_body_bytes: int = 4 * 2**20
    keep_alive_s: float = 5.0
    speculate: int = MAX_DRAFT_TOKENS
    reasoning_budget: int = -1
    strict: bool = False
    link_us: float = 0.0

    def __post_init__(self) -> None:
        if self.api_key is None:
            object.__setattr__(self, "api_key", os.environ.get("LANEFORMER_API_KEY"))
        key = self.api_key
        if key is not None and not (key.isascii() and key.strip() == key != ""):
            raise ValueError("the API key must be ASCII text without spaces around it, and not empty")
        if not self.model or not self.host:
            raise ValueError(f"model = {self.model!r} and host = {self.host!r} must not be empty")
        for name, (kind, low, high) in RANGES.items():
            object.__setattr__(self, name, in_range(name, getattr(self, name), kind, low, high))

    def listen(self, or_next: bool = False) -> socket.socket:
        """A listening socket, so that nobody else takes the port; ValueError says why there is none.

        or_next: a port that is in use may be one of the next, which is said on stderr.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            return socket.create_server((self.host, self.port), family=family)
        except OSError as error:
            if or_next and error.errno == errno.EADDRINUSE and self.port < RANGES["port"][2]:
                print(f"laneformer: port {self.port} is in use", file=sys.stderr)
                return dataclasses.replace(self, port=self.port + 1).listen(or_next)
            reason = (error.strerror or str(error)).partition(" (while")[0]
            raise ValueError(
                f"cannot listen on port {self.port} of {self.host}: {reason}; choose another --port or --host"
            ) from None
