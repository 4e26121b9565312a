"""What links the processes of one engine: memory that all of them map, or a TCP connection between any two.

Connections have no authentication: they are for machines that trust each other.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import socket
import tempfile
import time
from typing import IO, Any

MEETING_S = 300.0  # that the processes may take to start
SILENT_S = 10.0  # without a beat: a process that has started is hung
BEAT_S = 0.5
BEAT = b"\0"  # never part of a reply
LOADED = "loaded"  # begins a worker's reply once it has its weights; any other says why it has not
Address = tuple[str, int]


def shared_file() -> int:
    """An empty file without a name: nothing is left of it when the processes that hold it are gone."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("laneformer")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def launched(processes: int) -> tuple[int, Address]:
    """This process's rank, and where rank 0 listens, as the launcher says; ValueError where it does not."""
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError):
        raise ValueError(
            "transport = 'launched' needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment of every "
            "process, as launchers set them"
        ) from None
    if world != processes or not 0 <= rank < world:
        raise ValueError(f"processes = {processes}, but the launcher has started rank {rank} of {world}")
    return rank, address


def connected(address: Address) -> socket.socket:
    """To rank 0, which may listen only in a while."""
    deadline_s = time.monotonic() + MEETING_S
    while True:
        try:
            return socket.create_connection(address, MEETING_S)
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)


def controlled(rank: int, address: Address) -> socket.socket:
    """The connection over which rank 0 commands this process.

    It breaks when rank 0's machine has acknowledged no beat for SILENT_S. The machine of a stopped
    rank 0 still does.
    """
    connection = connected(address)
    connection.settimeout(None)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # elsewhere it breaks when the system gives up, after minutes
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT_S * 1000))
    tell(connection, [rank, os.getpid(), socket.gethostname()])
    return connection


def beat(replies: int) -> None:
    """Signs of life, from a thread that does nothing else: a process that computes for long is not hung."""
    with contextlib.suppress(OSError):  # rank 0 is gone; whoever reads its messages ends the process
        while True:
            os.write(replies, BEAT)
            time.sleep(BEAT_S)


def follow_replies(replies: IO[bytes], said: queue.SimpleQueue[str]) -> float:
    """Hand over a worker's replies, then "". Returns the seconds of silence after which it is hung, or
    0 at its end.

    Intervals without a beat are counted, not the clock's time: while this process does not run,
    no other is late.
    """
    waiting = select.poll()
    waiting.register(replies, select.POLLIN)
    reply, silent_s, longest_s = b"", 0.0, MEETING_S
    try:
        while silent_s < longest_s:
            if not waiting.poll(2 * BEAT_S * 1000):
                silent_s += 2 * BEAT_S
            elif heard := os.read(replies.fileno(), 4096):
                reply, silent_s, longest_s = reply + heard.replace(BEAT, b""), 0.0, SILENT_S
                *lines, reply = reply.split(b"\n")
                for line in lines:
                    said.put(line.decode())
            else:
                return 0.0
        return longest_s
    except OSError:  # a connection that was reset
        return 0.0
    finally:
        said.put("")


def listener(address: Address) -> socket.socket:
    return socket.create_server(address, backlog=1024)


def connect_all(rank: int, processes: int, address: Address) -> list[int]:
    """File descriptors of sockets to all other processes, after rank 0 at this address has
    met them all (`meet`).

    OSError where that takes too long.
    """
    first = connected(address)
    with listener((first.getsockname()[0], 0)) as own:
        own.settimeout(MEETING_S)
        tell(first, [rank, *own.getsockname()[:2]])
        addresses = heard(first)
        others = [
            first,
            *(socket.create_connection((host, port), MEETING_S) for host, port in addresses[: rank - 1]),
        ]
        others += [own.accept()[0] for _ in range(processes - 1 - rank)]
    return [ready(each) for each in others]


def meet(processes: int, meeting: socket.socket) -> list[int]:
    """The same by rank 0, to whom they come: it tells each where ranks 1, 2, ... listen."""
    meeting.settimeout(MEETING_S)
    came: dict[int, tuple[socket.socket, Address]] = {}
    while len(came) < processes - 1:
        connection, _ = meeting.accept()
        connection.settimeout(MEETING_S)
        rank, host, port = heard(connection)
        if rank in came or not 0 < rank < processes:
            raise OSError(f"a process says that it is rank {rank} of {processes}, which is not free")
        came[rank] = connection, (host, port)
    ordered = [came[rank] for rank in sorted(came)]
    for connection, _ in ordered:
        tell(connection, [address for _, address in ordered])
    return [ready(connection) for connection, _ in ordered]


def ready(connection: socket.socket) -> int:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection.detach()


def tell(connection: socket.socket, message: object) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def heard(connection: socket.socket) -> Any:
    """One line of JSON, and not a byte more: what follows is for others."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := connection.recv(1)):
            raise OSError("a process has closed its connection before all had met")
        line += byte
    return json.loads(line)
