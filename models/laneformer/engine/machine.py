"""Find the cores, CPU quota and memory that this process may use."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# keys of memory.stat in cgroup versions 2 and 1
NOT_RECLAIMED = ("anon", "file_mapped", "total_rss", "total_mapped_file")
PERFORMANCE_CAPACITY = 0.5  # share of the fastest core's: slower ones would delay every pass


@dataclass(frozen=True)
class Machine:
    """The CPUs that this process may use."""

    # of each physical core
    cores: tuple[tuple[int, ...], ...]
    # of efficiency cores beside them
    slow: tuple[int, ...] = ()
    # CPU seconds per second that the control groups allow; None: no limit
    quota_cpus: float | None = None
    # number of memory nodes of these CPUs
    nodes: int = 1

    @property
    def processors(self) -> float:
        """The number of threads that can run at once; with more, none should spin."""
        return min(len(self.one_cpu_a_core_first()), self.quota_cpus or float("inf"))

    @property
    def threads(self) -> int:
        """One thread per core, within the quota."""
        return max(1, min(len(self.cores), int(self.quota_cpus or len(self.cores))))

    def one_cpu_a_core_first(self) -> list[int]:
        """Return all CPUs: the first of each core, then their siblings, then the slow ones."""
        ranked = [(rank, cpu) for core in self.cores for rank, cpu in enumerate(core)]
        return [*(cpu for _, cpu in sorted(ranked)), *self.slow]


def this_machine(root: Path = Path("/"), allowed: set[int] | None = None) -> Machine:
    """Read Linux's files below `root`; `allowed`: CPUs, by default those of this process's affinity."""
    # macOS has neither those files nor an affinity
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
    # on x86 the kernel lists them by name, on Arm it gives capacities
    devices = root / "sys/devices"
    efficient = [
        *devices.glob("cpu_atom/cpus"),
        *devices.glob("system/cpu/types/intel_atom*/cpu*list"),
    ]
    slow = {cpu for path in efficient for cpu in cpu_list(text(path))}
    capacity = {
        cpu: float(text(devices / f"system/cpu/cpu{cpu}/cpu_capacity") or 0) for cpu in allowed
    }
    min_capacity = PERFORMANCE_CAPACITY * max(capacity.values())
    return {cpu for cpu in allowed - slow if capacity[cpu] >= min_capacity} or allowed


def quota_cpus(root: Path) -> float | None:
    # the least limit counts
    return min((limit for folder in control_groups(root) for limit in limits(folder)), default=None)


def control_groups(root: Path, controller: str = "cpu") -> Iterator[Path]:
    """Yield the folders of this process's control groups and their parents."""
    # versions 1 (with controllers) and 2
    mount = root / "sys/fs/cgroup"
    for line in text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # in a container /proc may name a path of the host that is not mounted: try its parents, too
        steps = [step for step in path.split("/") if step not in ("", "..")]
        for base in (
            (mount / controllers, mount / controller) if controllers else (mount, mount / "unified")
        ):
            yield from (base.joinpath(*steps[:depth]) for depth in range(len(steps), -1, -1))


def limits(folder: Path) -> Iterator[float]:
    quota, _, period = text(folder / "cpu.max").partition(" ")
    for value, unit in (
        (quota, period),
        *((text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")),),
    ):
        if value.isdigit() and unit.isdigit() and int(value) and int(unit):  # none is "max", or -1
            yield int(value) / int(unit)


def fast_cores() -> int:
    """Return the number of performance cores on macOS, if known, else 0."""
    if sys.platform != "darwin":
        return 0
    sysctl = subprocess.run(
        ["sysctl", "-n", "hw.perflevel0.physicalcpu"], capture_output=True, text=True
    )
    return int(sysctl.stdout) if sysctl.stdout.strip().isdigit() else 0


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that are free on the machine and within the limits of the control groups."""
    available = re.search(r"MemAvailable:\s+(\d+) kB", text(root / "proc/meminfo"))
    free_bytes = [1024 * int(available[1]) if available else memory_bytes()]
    for folder in control_groups(root, "memory"):
        limit = text(folder / "memory.max") or text(folder / "memory.limit_in_bytes")
        if limit.isdigit():
            # the page cache counts against the limit, but can be reclaimed
            used = dict(line.split() for line in text(folder / "memory.stat").splitlines())
            free_bytes += [int(limit) - sum(int(used.get(name, 0)) for name in NOT_RECLAIMED)]
    return max(0, min(free_bytes))


def file_system(path: Path, root: Path = Path("/")) -> str:
    """Return the type of a file's file system, such as "ext4"; empty where unknown."""
    device = path.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    mounts = [line.split() for line in text(root / "proc/self/mountinfo").splitlines()]
    return next((mount[mount.index("-") + 1] for mount in mounts if mount[2] == name), "")


def cpu_list(ranges_text: str) -> set[int]:
    # such as "0-3,8"
    ranges = [part.partition("-") for part in ranges_text.split(",") if part]
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
