"""A sandbox around each piece of code that a model writes: one bubblewrap, in which nothing can be written or shared.

It exposes the system's libraries and the given folders read-only, and no network, no process but its own, and no
writable file; root becomes nobody. A filter allows the system calls that a calculation needs and no others, so limits
on one process (evals/code/runner.py) are limits on the whole sandbox.
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from evals.code.system_calls import numbers

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/urandom")
NOBODY = "65534"
HOW = (
    "install bubblewrap (Debian: apt-get install bubblewrap) and allow user namespaces; in a container, run it with "
    "the rights to make namespaces (docker run --security-opt seccomp=unconfined); --unsafe-no-sandbox runs the "
    "model's code with all your rights"
)
PYTHON = Path(sys.executable).resolve()
PROBE = "import os; print('process', os.getpid(), flush=True); os.fork()"  # which is refused
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
CLONE, CLONE_THREAD = {"x86_64": 56, "aarch64": 220}, 0x10000
# system calls from here on came in 2019 or later: the C library does without where they do not exist
NEW = 403


def build_filter(machine: str) -> bytes:
    """Build the BPF program (linux/seccomp.h) that refuses what is not allowed."""
    if machine not in ARCHITECTURES:
        raise ValueError(
            f"no sandbox on {machine}: its system calls are known on {', '.join(ARCHITECTURES)}; {HOW}"
        )
    load = 0x20
    equal = 0x15
    at_least = 0x35
    any_bit = 0x45
    ret = 0x06
    number = 0
    architecture = 4
    first_argument = 16
    allow = 0x7FFF0000
    refuse = 0x00050000 | errno.EPERM
    missing = 0x00050000 | errno.ENOSYS
    # (operation, instructions to skip if true, if false, operand)
    program = [
        (load, 0, 0, architecture),
        (equal, 1, 0, ARCHITECTURES[machine]),
        (ret, 0, 0, refuse),
    ]
    program += [(load, 0, 0, number)]
    for allowed in numbers(machine):
        program += [(equal, 0, 1, allowed), (ret, 0, 0, allow)]
    # threads are allowed; clone3, whose flags a filter cannot read, does not exist: the C library
    # uses clone
    program += [
        (equal, 0, 3, CLONE[machine]),
        (load, 0, 0, first_argument),
        (any_bit, 0, 1, CLONE_THREAD),
    ]
    program += [(ret, 0, 0, allow), (load, 0, 0, number)]
    # the x32 numbers of x86_64 are refused as they are
    program += [
        (at_least, 2, 0, 0x40000000),
        (at_least, 0, 1, NEW),
        (ret, 0, 0, missing),
        (ret, 0, 0, refuse),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def build_sandbox(readable: Sequence[Path]) -> list[str]:
    """Build the command line of a bubblewrap in which `readable` and the system can be read."""
    command = [
        shutil.which("bwrap") or "bwrap",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
        "--unshare-uts",
        "--die-with-parent",
        "--new-session",  # not --as-pid-1: a change of user cancels --die-with-parent in the process itself
    ]
    visible = [*map(Path, SYSTEM), *map(Path, DEVICES), *readable]
    for parent in sorted({parent for path in visible for parent in path.parents} - {Path("/")}):
        # parents that bubblewrap makes by itself let only root pass
        command += ["--perms", "0755", "--dir", str(parent)]
    for path in SYSTEM:
        if os.path.islink(path) and os.path.isdir(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind-try", path, path]
    for folder in readable:
        command += ["--ro-bind", str(folder), str(folder)]
    for device in DEVICES:
        command += ["--dev-bind", device, device]
    command += ["--remount-ro", "/", "--chdir", "/"]
    if os.geteuid() == 0:
        return [*command, "--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return [*command, "--unshare-user", "--uid", NOBODY, "--gid", NOBODY]


def wrap_as_nobody(command: Sequence[str]) -> list[str]:
    # limits on a user's threads do not hold for root
    if os.geteuid() == 0:
        return ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", "--", *command]
    return list(command)


def find_obstacle() -> str:
    """Return what the sandbox lacks on this machine, or how it leaks; empty when it holds."""
    if shutil.which("bwrap") is None:
        return "bubblewrap (bwrap) is not installed"
    with tempfile.TemporaryFile() as rules:
        rules.write(build_filter(platform.machine()))
        rules.seek(0)
        python = [
            "--seccomp",
            str(rules.fileno()),
            *wrap_as_nobody([str(PYTHON), "-I", "-S", "-c", PROBE]),
        ]
        command = [*build_sandbox([Path(sys.base_prefix).resolve()]), *python]
        trial = subprocess.run(
            command, capture_output=True, text=True, timeout=60, pass_fds=[rules.fileno()]
        )
    holds = trial.stdout == "process 2\n" and "PermissionError" in trial.stderr
    return "" if holds else f"{' '.join(command)}: {trial.stdout}{trial.stderr.strip()}"


def find_sandbox(unsafe: bool = False) -> str:
    """Return "bubblewrap", or "none" when `unsafe`; ValueError with the way out where bubblewrap does not work."""
    if unsafe:
        return "none"
    if reason := find_obstacle():
        raise ValueError(f"no sandbox here for the code that a model writes ({reason}); {HOW}")
    return "bubblewrap"
