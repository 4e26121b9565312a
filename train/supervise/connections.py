"""Do the nodes reach each other where gloo would look for them?

Each node listens at the address that gloo would offer it by, and connects to all others. gloo itself only says that
its whole group did not come about; who of two nodes did not reach the other tells a node with a fault of its own,
which a spare can replace, from a setting that is wrong on all of them. Plain sockets and a store of torch's, no torch.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .node_settings import gloo_address

CONNECT_S = 10.0
SETTINGS = {
    "gloo": "export GLOO_SOCKET_IFNAME, the name of the interface by which they reach each other, check that their "
    "names do not mean 127.0.0.1, and that no firewall is between them",
    "nccl": "export NCCL_SOCKET_IFNAME and NCCL_IB_HCA, the interface and the InfiniBand adapters by which they reach "
    "each other, or NCCL_IB_DISABLE=1 to go without InfiniBand; NCCL_DEBUG=INFO says what it has chosen",
}  # fmt: skip
Lost = Sequence[Mapping[str, str]]  # of each node: {number of a node to which it cannot connect: why}


def problem(backend: str, why: str) -> str:
    """What to say where these nodes cannot train together, and the setting that mends it."""
    return f"{backend} does not connect these nodes ({' '.join(why.split())[:300]}); {SETTINGS[backend]}"


def connect(store: Any, node: int, nodes: int) -> None:
    """Offer a port of this node and connect to those of all others; `lost` has what came of it."""
    address = gloo_address(os.environ)
    family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=nodes) as server:
        store.set(f"place of node {node}", json.dumps(server.getsockname()[:2]))
        others = [other for other in range(nodes) if other != node]
        places = [tuple(json.loads(store.get(f"place of node {other}"))) for other in others]
        with ThreadPoolExecutor(max(1, len(others))) as pool:
            said = dict(zip(map(str, others), pool.map(unreached, places), strict=True))
        store.set(f"lost by node {node}", json.dumps({other: why for other, why in said.items() if why}))
        lost(store, nodes)  # the port is open until all have tried it


def unreached(place: tuple[str, int]) -> str:
    """Why a connection to (address, port) fails; "" if it does not. The system accepts it, no program has to."""
    try:
        socket.create_connection(place, CONNECT_S).close()
    except OSError as error:
        return f"{place[0]}: {error.strerror or error}"
    return ""


def lost(store: Any, nodes: int) -> Lost:
    """What all nodes have found; waits for them."""
    return [json.loads(store.get(f"lost by node {node}")) for node in range(nodes)]


def blamed(found: Lost) -> list[int]:
    """Nodes without which all others reach each other: again and again the one that most pairs have lost."""
    pairs = {frozenset((node, int(other))) for node, others in enumerate(found) for other in others}
    chosen: list[int] = []
    while pairs:
        chosen.append(Counter(node for pair in pairs for node in pair).most_common(1)[0][0])
        pairs = {pair for pair in pairs if chosen[-1] not in pair}
    return chosen


def judge(found: Lost, nodes: list[str]) -> tuple[str, dict[str, str]]:
    """(why no choice of these nodes can train together or "", {node to leave out: why})."""
    left_out = blamed(found)
    words = {
        node: [f"{nodes[a]} does not reach {nodes[int(b)]} at {why}" for a, others in enumerate(found)
               for b, why in others.items() if node in (a, int(b))]
        for node in left_out
    }  # fmt: skip
    if 2 * len(left_out) >= len(nodes):
        return problem("gloo", words[left_out[0]][0]), {}
    return "", {
        nodes[node]: f"network: {said[0]}, {len(said)} such pairs; {SETTINGS['gloo']}"
        for node, said in words.items()
    }
