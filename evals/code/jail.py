"""What runs inside the sandbox, with EvalPlus's own Python: sanitize answers; score solutions, each in its own jail.

EvalPlus runs a solution in a child of its worker, with the worker's user, process numbers and files. A solution that
kills its parent, floods the disk or writes the result file would decide about all others. So every solution gets
namespaces of its own (user, processes, mounts, IPC): it cannot name any process but its own, sees only empty folders
where results and temporary files lie, and everything it started dies with it. Its parent watches memory and the number
of processes of the whole tree, which limits on single processes cannot.

This file imports nothing of ours: it is copied into the sandbox. `python jail.py sanitize|evaluate REQUEST.json`.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

NOBODY = 65534
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x08000000, 0x10000000, 0x20000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY, MOUNT_ATTR_NODEV, SYS_MOUNT_SETATTR = -100, 0x8000, 1, 4, 442
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
CAPABILITY_VERSION_3 = 0x20080522
DEVICES = ("/dev/null", "/dev/urandom")
POLL_S = 0.02

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> None:
    """A function of the C library that says -1 on failure: OSError then."""
    if getattr(libc, name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount_empty(folder: str, size_bytes: int) -> None:
    """Lay an empty file system in memory over a folder."""
    options = f"size={size_bytes},nr_inodes=4096,mode=777".encode()
    call("mount", b"tmpfs", folder.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options)


def set_mount(path: str, add: int, remove: int, flags: int = 0) -> None:
    attributes = (ctypes.c_uint64 * 4)(add, remove, 0, 0)
    call("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, attributes, ctypes.sizeof(attributes))


def make_read_only(writable: str) -> None:
    """Everything read-only and without devices but `writable`: what bubblewrap does, for a plain mount namespace.

    Devices and sockets could be written to all the same, so the first do not open and the second are covered.
    """
    call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    for path in (writable, *DEVICES):
        call("mount", path.encode(), path.encode(), None, MS_BIND, None)
    set_mount("/", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV, 0, AT_RECURSIVE)
    set_mount(writable, 0, MOUNT_ATTR_RDONLY)
    set_mount("/proc", 0, MOUNT_ATTR_RDONLY)  # where jails are made
    for path in DEVICES:
        set_mount(path, 0, MOUNT_ATTR_NODEV)
    for path in ("/dev/shm", "/run"):
        mount_empty(path, 2**26)


def enter_namespaces() -> None:
    """New user, mount and IPC namespaces for this process; its next child is process 1 of a new process namespace."""
    user, group = os.geteuid(), os.getegid()
    call("unshare", CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC)
    call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # else /proc/self belongs to root
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)


def drop_privileges() -> None:
    """No capabilities and no way to new ones: the mounts above cannot be undone."""
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("capset", (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)())


def limit_process(limits: dict[str, int]) -> None:
    for name, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_STACK, limits["memory_bytes"]),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(name, (value, value))


def tree_of(root: int) -> tuple[int, int]:
    """Processes below and including `root`, and the memory they hold, in bytes."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it ended meanwhile
                continue
            children.setdefault(parent, []).append(int(entry))
    count, resident_bytes, todo = 0, 0, [root]
    while todo:
        pid = todo.pop()
        todo += children.get(pid, [])
        try:
            resident_bytes += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
            count += 1
        except OSError:
            continue
    return count, resident_bytes


def watch(child: int, limits: dict[str, int]) -> None:
    """Until the child ends; it and all it started are killed when they outgrow the limits, or when we are."""
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        count, resident_bytes = tree_of(child)
        if count > limits["processes"] or resident_bytes > limits["memory_bytes"]:
            os.kill(child, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, POLL_S)


def jailed(work: Callable[..., None], covered: list[str], limits: dict[str, int]) -> Callable[..., None]:
    """`work` for a forked process, run in a jail of its own; `covered` folders are empty there.

    All that leaves the jail is what `work` writes to shared memory. The limit on memory is for what comes on top of
    what the process is forked with: the expected outputs of Mbpp/255 alone are 1.5 GiB, twice in every worker.
    """

    def run(*arguments: Any) -> None:
        address_space_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        own_limits = limits | {"memory_bytes": limits["memory_bytes"] + address_space_bytes}
        enter_namespaces()
        child = os.fork()
        if child:
            return watch(child, own_limits)
        try:  # process 1 of the jail: the kernel ends all others with it
            call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            os.chdir("/")
            tempfile.tempdir = "/tmp"
            for folder in covered:
                mount_empty(folder, limits["file_bytes"])
            nothing = os.open("/dev/null", os.O_RDWR)
            for standard in range(3):
                os.dup2(nothing, standard)
            os.closerange(3, 65536)  # the worker's pipes among them
            os.setsid()
            drop_privileges()
            limit_process(own_limits)
            work(*arguments)
        finally:
            os._exit(0)

    return run


def check_jail(covered: list[str], limits: dict[str, int]) -> None:
    """RuntimeError unless a jail starts and hides what it must: no score would mean anything otherwise."""
    seen = multiprocessing.Array("i", [-1, -1, -1])

    def look() -> None:
        visible = sum(len(os.listdir(folder)) for folder in covered if os.path.isdir(folder))
        seen[:] = [os.getpid(), os.getppid(), visible]

    process = multiprocessing.Process(target=jailed(look, covered, limits))
    process.start()
    process.join()
    if seen[:] != [1, 0, 0]:
        raise RuntimeError(f"the jail of a solution does not hold: process, parent, files it sees = {seen[:]}")


def evaluate(request: dict[str, Any], guarded: bool) -> None:
    """EvalPlus's evaluation of a samples file, each solution in its jail; the results lie beside it."""
    import evalplus.eval  # reads the data set's path from the environment when imported
    from evalplus.evaluate import evaluate as evalplus_evaluate

    if guarded:
        covered = [request["folder"], "/proc", "/dev/shm", "/tmp"]
        check_jail(covered, request["limits"])
        evalplus.eval.query_maximum_memory_bytes = lambda: None  # the jail sets the limit
        evalplus.eval.unsafe_execute = jailed(evalplus.eval.unsafe_execute, covered, request["limits"])
    evalplus_evaluate(
        dataset=request["dataset"],
        samples=request["samples"],
        parallel=request["parallel"],
        min_time_limit=request["min_time_limit_s"],
        gt_time_limit_factor=10,  # the default fails right solutions on a slow machine
    )


def sanitize(request: dict[str, Any]) -> None:
    """EvalPlus's sanitize over selected texts, each in a process with a time limit: it parses O(lines^2) times.

    A text that takes longer, or kills the parser, is scored as it was selected.
    """
    from evalplus.sanitize import sanitize as evalplus_sanitize

    def work(text: str, entry_point: str, sender: Any) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # it prints every text that does not parse
        sender.send(evalplus_sanitize(text, entry_point))

    done = []
    for row in json.loads(Path(request["selected"]).read_text()):
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.Process(target=work, args=(row["text"], row["entry_point"], sender))
        process.start()
        sender.close()
        try:
            solution = receiver.recv() if receiver.poll(request["sanitize_s"]) else None
        except EOFError:  # the parser died
            solution = None
        process.kill()
        process.join()
        done.append(solution)
    Path(request["sanitized"]).write_text(json.dumps(done))


def main() -> None:
    verb, path = sys.argv[1:]
    request = json.loads(Path(path).read_text())
    if request["sandbox"] == "unshare":
        make_read_only(request["folder"])
    if request["sandbox"] == "bubblewrap" and os.geteuid() == 0:  # limits on a user's processes do not hold for root
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    multiprocessing.set_start_method("fork")  # what is patched here is to hold in EvalPlus's workers
    if verb == "sanitize":
        sanitize(request)
    else:
        evaluate(request, request["sandbox"] != "none")


if __name__ == "__main__":
    status = 1
    try:
        main()
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)  # EvalPlus leaves a thread that sleeps 20 s, or indefinitely after an error
