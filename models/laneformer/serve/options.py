"""Options of `run` and `create_app`: the flags of `laneformer serve`, validated in one place."""

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


@dataclass
class ServerOptions:
    model_name: str = ""
    """Name of the model for clients; default: that of its folder or file."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is all IPv4 addresses, :: also IPv6; set an API key then."""
    port: int = 8000
    """Port; 0: any free one, which is printed. With --open, a busy port is replaced by the next free one."""
    api_key: str | None = None
    """Key that clients must send as "Authorization: Bearer KEY".
    Default: the environment variable LANEFORMER_API_KEY, which other users cannot see.
    """
    host_names: tuple[str, ...] = ()
    """Host names that requests may use, besides localhost and IP addresses."""
    allowed_origins: tuple[str, ...] = ()
    """CORS: origins whose pages may use the server, such as https://notes.example; *: all."""
    max_waiting: int = 16
    """Maximum number of queued requests; further ones get status 429."""
    deadline_s: float = 600.0
    """Timeout of a request in seconds, queueing included."""
    grace_s: float = 10.0
    """Seconds that running requests have to finish after SIGTERM."""
    max_body_bytes: int = 4 * 2**20
    """Maximum size of a request's body."""
    keep_alive_s: float = 5.0
    """Seconds without a token after which a stream gets a comment, as during a long prefill."""
    speculate: int = MAX_DRAFT_TOKENS
    """Default maximum of draft tokens per pass; 0: none. Answers do not change."""
    reasoning_budget: int = -1
    """Default limit of reasoning tokens, after which </think> is forced; -1: no limit."""
    strict: bool = False
    """Refuse fields without effect instead of naming them in the response header `warnings`."""
    link_us: float = 0.0
    """Microseconds of latency to inject between lanes of different threads; CPU only. The playground shows its cost."""

    def __post_init__(self) -> None:
        if self.api_key is None:
            self.api_key = os.environ.get("LANEFORMER_API_KEY")
        key = self.api_key
        if key is not None and not (key.isascii() and key.strip() == key != ""):
            raise ValueError(
                "the API key must be ASCII text without spaces around it, and not empty"
            )
        if self.host.startswith("["):  # an IPv6 address as in a URL
            self.host = self.host.strip("[]")
        if not self.host:
            raise ValueError(
                "host must not be empty; use 127.0.0.1, or 0.0.0.0 or :: for all addresses"
            )
        for name, (kind, low, high) in RANGES.items():
            setattr(self, name, in_range(name, getattr(self, name), kind, low, high))

    def listen(self, or_next: bool = False) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            # One socket for IPv4 and IPv6 where the system has both
            dual_stack = self.host == "::" and socket.has_dualstack_ipv6()
            listening = socket.create_server(
                (self.host, self.port), family=family, dualstack_ipv6=dual_stack
            )
        except OSError as error:
            if or_next and error.errno == errno.EADDRINUSE and self.port < RANGES["port"][2]:
                print(f"laneformer: port {self.port} is in use", file=sys.stderr)
                return dataclasses.replace(self, port=self.port + 1).listen(or_next)
            reason = (error.strerror or str(error)).partition(" (while")[0]
            raise ValueError(
                f"cannot listen on port {self.port} of {self.host}: {reason}; choose another --port or --host"
            ) from None
        # Other machines can reach the server, and no key protects it
        if self.host not in ("127.0.0.1", "localhost", "::1") and self.api_key is None:
            warning = f"{self.host} without an API key: everyone who can reach it may use it; set --api-key"
            print(f"laneformer: WARNING: {warning}", file=sys.stderr)
        return listening
