"""Settings of a node that fail a job late and do not say why; each complaint names what mends it.

names(...)    what gloo, which saves and counts go through, tells other nodes to reach this one by
locked(...)   memory that may be locked, which InfiniBand and pinned staging register
caches(...)   compile caches on a file system that all nodes share
"""

from __future__ import annotations

import ipaddress
import mmap
import os
import resource
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from .attempt import local_cache

INFINIBAND = Path("/sys/class/infiniband")
LOCKED_BYTES = 1 << 30  # less is the default of a login shell: kibibytes or a few mebibytes
REGISTERED_BYTES = 64 << 20
NETWORK_FILE_SYSTEMS = (
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb3",
    "fuse.sshfs",
    "9p",
    "wekafs",
)
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "torchinductor", "TRITON_CACHE_DIR": "triton"}


def names(environment: Mapping[str, str], nodes: int) -> dict[str, Any]:
    """What gloo offers this node by. Raises ValueError where no other node could reach it."""
    wanted = environment.get("GLOO_SOCKET_IFNAME", "")
    if not wanted and nodes < 2:
        return {"interface": "any"}
    address = gloo_address(environment)
    if _loopback(address) and not wanted:
        raise ValueError(
            f"{socket.gethostname()} is {address} on this node, which other nodes would call themselves by; "
            f"{_choose(_addresses())}, or mend /etc/hosts"
        )
    return {"interface": wanted or address}


def gloo_address(environment: Mapping[str, str]) -> str:
    """Where gloo listens on this node: at its first interface of GLOO_SOCKET_IFNAME, or at the first address of the
    node's name that is its own. Raises ValueError where there is none, with the interfaces to choose from.
    """
    addresses = _addresses()
    wanted = [name for name in environment.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    for name in wanted:
        if not addresses.get(name):
            raise ValueError(
                f"GLOO_SOCKET_IFNAME = {','.join(wanted)}, but {name} has no address on this node; "
                f"{_choose(addresses)}"
            )
    if wanted:
        return addresses[wanted[0]][0]
    host = socket.gethostname()
    try:
        found = [str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError as problem:
        raise ValueError(
            f"this node cannot look up its own name {host} ({problem}); {_choose(addresses)}"
        ) from None
    here = {address for each in addresses.values() for address in each}
    for address in found:
        if address in here or _loopback(address):
            return address
    raise ValueError(
        f"{host} is {', '.join(found)}, which is no address of this node, so gloo would offer it as 127.0.0.1; "
        f"{_choose(addresses)}, or mend /etc/hosts"
    )


def _addresses() -> dict[str, list[str]]:
    """By interface."""
    families = socket.AF_INET, socket.AF_INET6
    found = psutil.net_if_addrs().items()
    return {name: [each.address for each in those if each.family in families] for name, those in found}


def _choose(addresses: Mapping[str, list[str]]) -> str:
    usable = sorted(name for name, found in addresses.items() if found and not all(map(_loopback, found)))
    return f"export GLOO_SOCKET_IFNAME, one of {', '.join(usable) or 'none: no interface of this node has an address'}"


def _loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def locked(pinned: bool, gpus: int, nodes: int) -> dict[str, Any]:
    """The limit on locked memory, None: unlimited. Raises ValueError where InfiniBand or pinned staging would fail.

    pinned: checkpoint.async_mode = "async_with_pinned_mem", of which a small piece is tried, as a save does it.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = limit == resource.RLIM_INFINITY
    words = "unlimited" if unlimited else f"{limit >> 10} KiB"
    mend = "set LimitMEMLOCK=infinity for slurmd, or `ulimit -l unlimited`"
    if (
        nodes > 1
        and not unlimited
        and limit < LOCKED_BYTES
        and INFINIBAND.is_dir()
        and any(INFINIBAND.iterdir())
    ):
        raise ValueError(f"{words} of memory may be locked, and NCCL registers more for InfiniBand; {mend}")
    if pinned and gpus and (status := register()):
        raise ValueError(
            f"cudaHostRegister of {REGISTERED_BYTES >> 20} MiB failed with status {status} (memory that may be locked: "
            f'{words}), and so would saves; {mend}, or checkpoint.async_mode = "async"'
        )
    return {"locked_bytes": None if unlimited else limit}


def register() -> int:
    """The status of pinning memory that processes share, 0 if it works."""
    import torch

    with mmap.mmap(-1, REGISTERED_BYTES) as shared:
        runtime, tensor = torch.cuda.cudart(), torch.frombuffer(shared, dtype=torch.uint8)
        status = int(runtime.cudaHostRegister(tensor.data_ptr(), REGISTERED_BYTES, 0))
        if status == 0:
            runtime.cudaHostUnregister(tensor.data_ptr())
        del tensor  # the map cannot be closed while it is seen
    return status


def caches(environment: Mapping[str, str], mounts: Path = Path("/proc/mounts")) -> dict[str, Any]:
    """Folders of compiled kernels. Raises ValueError for one on a file system of the network."""
    found = {}
    for variable, name in CACHES.items():
        folder = Path(environment.get(variable) or local_cache(name)).absolute()
        kind = file_system(folder, mounts)
        if kind in NETWORK_FILE_SYSTEMS:
            raise ValueError(
                f"compiled kernels would lie in {folder}, which is on {kind}: every rank of every node would lock and "
                f"read them there at the start; export {variable}=/tmp/{name}, or another folder of the node's own"
            )
        found[variable] = str(folder)
    return found


def file_system(path: Path, mounts: Path) -> str:
    """The type of the file system that a path, which need not exist, is on; "" where nothing says it."""
    best, kind = -1, ""
    path = Path(os.path.realpath(path))
    for line in mounts.read_text().splitlines():
        _, where, its_kind, *_ = line.split()
        point = Path(where.replace("\\040", " "))
        if path.is_relative_to(point) and len(point.parts) >= best:  # a later mount covers an earlier one
            best, kind = len(point.parts), its_kind
    return kind
