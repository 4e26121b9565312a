"""Tests of cores, quotas and memory nodes, read from mock trees of /sys and /proc."""

from __future__ import annotations

from pathlib import Path

import pytest

from laneformer.engine import machine
from laneformer.engine.cpu.decoder import plan_threads
from laneformer.engine.machine import Machine, this_machine

CPU = "sys/devices/system/cpu"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, value in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(value + "\n")
    return root


def siblings(*cores: str) -> dict[str, str]:
    return {
        f"{CPU}/cpu{cpu}/topology/thread_siblings_list": core
        for core in cores
        for cpu in machine.cpu_list(core)
    }


def test_a_core_with_two_threads_counts_once(tmp_path):
    host = this_machine(tree(tmp_path, siblings("0,4", "1,5", "2,6", "3,7")), set(range(8)))
    assert host == Machine(((0, 4), (1, 5), (2, 6), (3, 7)))
    assert plan_threads(host, 8) == 4
    assert host.processors == 8
    # hyperthreads come last
    assert host.one_cpu_a_core_first() == [0, 1, 2, 3, 4, 5, 6, 7]
    part = this_machine(tmp_path, {1, 5, 6})  # affinity
    assert part.cores == ((1, 5), (6,))
    assert part.one_cpu_a_core_first() == [1, 6, 5]


def test_threads_are_those_that_leave_the_slowest_one_least():
    for cores, lanes, threads in (
        # cores, lanes, threads
        (2, 8, 2),
        (3, 8, 3),
        (5, 8, 4),
        (6, 8, 6),
        (7, 8, 6),
        (8, 8, 8),
        (12, 8, 12),
        (70, 8, 64),
        (3, 4, 3),
        (6, 1, 6),
    ):
        assert plan_threads(Machine(tuple((cpu,) for cpu in range(cores))), lanes) == threads


@pytest.mark.parametrize(
    "files",
    [
        {"sys/devices/cpu_atom/cpus": "4-7"},
        {f"{CPU}/types/intel_atom_0/cpulist": "4-7"},
        {
            f"{CPU}/cpu{cpu}/cpu_capacity": capacity
            for cpu, capacity in enumerate(["1024", *["800"] * 3, *["350"] * 4])
        },
    ],
)
def test_efficiency_cores_are_left_to_others(tmp_path, files):
    # Intel's CPUs are listed in one of two places; ARM's have a capacity each
    host = this_machine(tree(tmp_path, {**files, **siblings("0,1", "2,3")}), set(range(8)))
    assert host.cores == ((0, 1), (2, 3))
    assert host.slow == (4, 5, 6, 7)
    assert plan_threads(host, 8) == 2
    assert host.processors == 8, "whoever asks for more threads gets them, and they may spin"
    only_slow = this_machine(tmp_path, {5, 6})
    assert (only_slow.cores, only_slow.slow) == (((5,), (6,)), ())


V1 = "sys/fs/cgroup/cpu"
QUOTAS = [
    ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None),
    ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "250000 100000"}, 2.5),
    (  # the least of the nested ones, wherever it is
        {
            "proc/self/cgroup": "0::/pod/box",
            "sys/fs/cgroup/pod/cpu.max": "300000 100000",
            "sys/fs/cgroup/pod/box/cpu.max": "500000 100000",
        },
        3.0,
    ),
    (
        {
            "proc/self/cgroup": "4:memory:/a\n3:cpu,cpuacct:/pod/box\n0::/",
            f"{V1},cpuacct/pod/box/cpu.cfs_quota_us": "-1",
            f"{V1},cpuacct/pod/box/cpu.cfs_period_us": "100000",
            f"{V1},cpuacct/pod/cpu.cfs_quota_us": "150000",
            f"{V1},cpuacct/pod/cpu.cfs_period_us": "100000",
        },
        1.5,
    ),
    (  # Docker, version 1: /proc names the host's path, the mount begins at the container's
        {
            "proc/self/cgroup": "1:cpu:/docker/0a1b",
            f"{V1}/cpu.cfs_quota_us": "50000",
            f"{V1}/cpu.cfs_period_us": "100000",
        },
        0.5,
    ),
    ({"proc/self/cgroup": "0::/../..", "sys/fs/cgroup/unified/cpu.max": "400000 100000"}, 4.0),
]


def test_quotas_of_control_groups(tmp_path):
    for number, (files, quota) in enumerate(QUOTAS):
        host = this_machine(tree(tmp_path / str(number), files), {0, 1, 2})
        assert host.quota_cpus == quota
        assert plan_threads(host, 8) == max(1, min(3, int(quota or 3)))
        assert host.processors == min(3, quota or 3), "two threads on 1.5 CPUs must not spin"


def test_memory_nodes_are_those_of_the_allowed_cpus(tmp_path):
    nodes = "sys/devices/system/node"
    tree(
        tmp_path,
        {
            f"{nodes}/node0/cpulist": "0-1",
            f"{nodes}/node1/cpulist": "2-3",
            # memory without CPUs
            f"{nodes}/node2/cpulist": "",
        },
    )
    assert this_machine(tmp_path, {0, 1, 2, 3}).nodes == 2
    assert this_machine(tmp_path, {2, 3}).nodes == 1


def test_macos_counts_its_performance_cores(tmp_path, monkeypatch):
    program = tmp_path / "sysctl"
    # a `sysctl` that knows the performance cores alone
    program.write_text('#!/bin/sh\n[ "$2" = hw.perflevel0.physicalcpu ] && echo 6\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    # macOS has no affinity
    monkeypatch.delattr(machine.os, "sched_getaffinity")
    assert plan_threads(this_machine(), 8) == 6
