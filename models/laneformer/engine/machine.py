"""The processors and the memory that this process may use: cores, CPU quotas, memory nodes.

Everything is read from the files of Linux below one root folder; on macOS, sysctl says how many
fast cores there are.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# memory.stat of versions 2 and 1
NOT_RECLAIMED = ("anon", "file_mapped", "total_rss", "total_mapped_file")
PERFORMANCE_CAPACITY = 0.5  # of the fastest core's: slower ones would hold up every pass


@dataclass(frozen=True)
class Machine:
    """cores: the CPUs of each physical core that this process may use; slow: those of
    efficiency cores beside them.

    quota_cpus: CPU seconds a second that the control groups allow; None: no limit. nodes: memory
    nodes of those CPUs.
    """

    cores: tuple[tuple[int, ...], ...]
    slow: tuple[int, ...] = ()
    quota_cpus: float | None = None
    nodes: int = 1

    @property
    def processors(self) -> float:
        """How many threads can run at once: beyond that, none should spin."""
        return min(len(self.one_cpu_a_core_first()), self.quota_cpus or float("inf"))

    @property
    def threads(self) -> int:
        """One a core, and within the quota."""
        return max(1, min(len(self.cores), int(self.quota_cpus or len(self.cores))))

    def one_cpu_a_core_first(self) -> list[int]:
        """All CPUs: the first of each core, then their siblings, then the slow ones."""
        ranked = [(rank, cpu) for core in self.cores for rank, cpu in enumerate(core)]
        return [*(cpu for _, cpu in sorted(ranked)), *self.slow]


def this_machine(root: Path = Path("/"), allowed: set[int] | None = None) -> Machine:
    """What the files below `root` say; `allowed`: CPUs, by default those of this process's affinity."""
    if allowed is None and not hasattr(os, "sched_getaffinity"):
        return Machine(tuple((cpu,) for cpu in range(fast_cores() or os.cpu_count() or 1)))
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    fast = performance_cpus(root, allowed)
    cores: dict[str, list[int]] = {}
    for cpu in sorted(fast):
        siblings = text(
            root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        ) or str(cpu)
        cores.setdefault(siblings, []).append(cpu)
    nodes = [
        cpu_list(text(path)) & allowed
        for path in (root / "sys/devices/system/node").glob("node*/cpulist")
    ]
    return Machine(
        tuple(map(tuple, cores.values())),
        tuple(sorted(allowed - fast)),
        quota_cpus(root),
        max(1, sum(map(bool, nodes))),
    )


def performance_cpus(root: Path, allowed: set[int]) -> set[int]:
    """The allowed CPUs without the efficiency cores that the kernel tells apart: by name on x86,
    by capacity on Arm.
    """
    devices = root / "sys/devices"
    efficient = [
        *devices.glob("cpu_atom/cpus"),
        *devices.glob("system/cpu/types/intel_atom*/cpu*list"),
    ]
    slow = {cpu for path in efficient for cpu in cpu_list(text(path))}
    capacity = {
        cpu: float(text(devices / f"system/cpu/cpu{cpu}/cpu_capacity") or 0) for cpu in allowed
    }
    enough = PERFORMANCE_CAPACITY * max(capacity.values())
    return {cpu for cpu in allowed - slow if capacity[cpu] >= enough} or allowed


def quota_cpus(root: Path) -> float | None:
    """The least limit of this process's control group and of those above it, in CPUs."""
    return min((limit for folder in control_groups(root) for limit in limits(folder)), default=None)


def control_groups(root: Path, controller: str = "cpu") -> Iterator[Path]:
    """Folders of versions 1 and 2; in a container /proc may name a path of the host that
    is not mounted there.
    """
    mount = root / "sys/fs/cgroup"
    for line in text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        steps = [step for step in path.split("/") if step not in ("", "..")]
        for base in (
            (mount / controllers, mount / controller) if controllers else (mount, mount / "unified")
        ):
            yield from (base.joinpath(*steps[:depth]) for depth in range(len(steps), -1, -1))


def limits(folder: Path) -> Iterator[float]:
    quota, _, period = text(folder / "cpu.max").partition(" ")
    for value, each in (
        (quota, period),
        *((text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")),),
    ):
        if value.isdigit() and each.isdigit() and int(value) and int(each):  # none is "max", or -1
            yield int(value) / int(each)


def fast_cores() -> int:
    """macOS: the performance cores; 0 where sysctl does not tell them apart."""
    if sys.platform != "darwin":
        return 0
    asked = subprocess.run(
        ["sysctl", "-n", "hw.perflevel0.physicalcpu"], capture_output=True, text=True
    )
    return int(asked.stdout) if asked.stdout.strip().isdigit() else 0


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory_bytes(root: Path = Path("/")) -> int:
    """What this process may still take: of the machine's memory, and within the limits of its control groups."""
    available = re.search(r"MemAvailable:\s+(\d+) kB", text(root / "proc/meminfo"))
    left = [1024 * int(available[1]) if available else memory_bytes()]
    for folder in control_groups(root, "memory"):
        limit = text(folder / "memory.max") or text(folder / "memory.limit_in_bytes")
        if limit.isdigit():
            used = dict(line.split() for line in text(folder / "memory.stat").splitlines())
            left += [int(limit) - sum(int(used.get(name, 0)) for name in NOT_RECLAIMED)]
    return max(0, min(left))


def file_system(path: Path, root: Path = Path("/")) -> str:
    """The type, such as "ext4", of what holds a file; empty where the system does not tell."""
    device = path.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    mounts = [line.split() for line in text(root / "proc/self/mountinfo").splitlines()]
    return next((mount[mount.index("-") + 1] for mount in mounts if mount[2] == name), "")


def cpu_list(listed: str) -> set[int]:
    """ "0-3,8" -> {0, 1, 2, 3, 8}"""
    ranges = [part.partition("-") for part in listed.split(",") if part]
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def text(path: Path) -> str:
    """The file's one value or lines; empty where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
