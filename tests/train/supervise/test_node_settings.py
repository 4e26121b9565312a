"""Settings that fail a job late are named before it starts, each with what mends it."""

from __future__ import annotations

import resource
import socket
from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from train.supervise import node_settings
from train.supervise.node_settings import caches, file_system, locked, names

Address = namedtuple("Address", "family address")


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "lo": [Address(socket.AF_INET, "127.0.0.1"), Address(socket.AF_INET6, "::1")],
        "eth0": [Address(psutil.AF_LINK, "00:00"), Address(socket.AF_INET, "10.0.0.7")],
        "ib0": [Address(socket.AF_INET6, "fe80::1%ib0")],
        "eth1": [Address(psutil.AF_LINK, "00:01")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)


def resolve(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    def lookup(host: str, *_: object, **__: object) -> list:
        if not addresses:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(socket, "gethostname", lambda: "n1")


def test_a_name_that_means_this_node_everywhere_is_refused(
    interfaces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's 127.0.1.1, at which every node would look for all others."""
    resolve(monkeypatch, "127.0.1.1")
    said = r"^n1 is 127\.0\.1\.1 on this node.*GLOO_SOCKET_IFNAME, one of eth0, ib0, or mend"
    with pytest.raises(ValueError, match=said):
        names({}, nodes=2)
    assert names({}, nodes=1) == {"interface": "any"}, "one node may call itself what it likes"
    assert names({"GLOO_SOCKET_IFNAME": "eth0"}, nodes=2) == {"interface": "eth0"}
    resolve(monkeypatch, "10.0.0.7")
    assert names({}, nodes=2) == {"interface": "10.0.0.7"}
    resolve(monkeypatch)
    with pytest.raises(ValueError, match="cannot look up its own name n1"):
        names({}, nodes=2)
    resolve(monkeypatch, "198.51.100.4", "10.0.0.7")
    assert names({}, nodes=2) == {"interface": "10.0.0.7"}, "gloo takes the first that it can bind"
    resolve(monkeypatch, "198.51.100.4")
    with pytest.raises(
        ValueError, match=r"n1 is 198\.51\.100\.4, which is no address of this node.*one of eth0, ib0"
    ):
        names({}, nodes=2)


@pytest.mark.parametrize("name", ["eth1", "eth7", "eth0,eth7"])
def test_an_interface_without_an_address_is_refused(interfaces: None, name: str) -> None:
    said = r"but eth\d has no address on this node; export GLOO_SOCKET_IFNAME, one of eth0, ib0"
    with pytest.raises(ValueError, match=said):
        names({"GLOO_SOCKET_IFNAME": name}, nodes=1)


def limit(monkeypatch: pytest.MonkeyPatch, found: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (found, found))


def test_a_small_limit_on_locked_memory_is_refused_where_infiniband_needs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(node_settings, "INFINIBAND", tmp_path)
    limit(monkeypatch, 8 << 20)
    assert locked(pinned=False, gpus=8, nodes=2) == {"locked_bytes": 8 << 20}
    (tmp_path / "mlx5_0").touch()
    assert locked(pinned=False, gpus=8, nodes=1)
    with pytest.raises(
        ValueError, match=r"8192 KiB of memory may be locked, and NCCL registers more.*LimitMEMLOCK=infinity"
    ):
        locked(pinned=False, gpus=8, nodes=2)
    limit(monkeypatch, resource.RLIM_INFINITY)
    assert locked(pinned=False, gpus=8, nodes=2) == {"locked_bytes": None}


def test_memory_that_cannot_be_pinned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = []
    monkeypatch.setattr(node_settings, "register", lambda: statuses.append(2) or 2)
    assert locked(pinned=True, gpus=0, nodes=1)
    assert locked(pinned=False, gpus=8, nodes=1)
    assert not statuses
    with pytest.raises(
        ValueError, match=r'cudaHostRegister of 64 MiB failed with status 2.*async_mode = "async"'
    ):
        locked(pinned=True, gpus=8, nodes=1)


def test_compile_caches_on_the_network_are_refused(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "overlay / overlay rw 0 0\nserver:/home /home nfs4 rw 0 0\n/dev/sda /home/local ext4 rw 0 0\n"
        "server:/my\\040data /my\\040data lustre rw 0 0\n"
    )
    assert file_system(Path("/home/me/.triton/cache"), mounts) == "nfs4"
    assert file_system(Path("/home/local/x"), mounts) == "ext4"
    assert file_system(Path("/my data/x"), mounts) == "lustre"
    assert set(caches({}, mounts)) == {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
    with pytest.raises(
        ValueError, match=r"lie in /home/me/c, which is on nfs4.*export TRITON_CACHE_DIR=/tmp/triton"
    ):
        caches({"TRITON_CACHE_DIR": "/home/me/c"}, mounts)
