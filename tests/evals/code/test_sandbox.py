"""Tests of what code can do in the sandbox, as root and as an ordinary user."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from evals.code import sandbox, system_calls
from evals.code.sandbox import build_filter, find_sandbox
from tests.evals.code.code_assets import needs_sandbox

SOURCE = Path(sandbox.__file__).parent
# run with the system's Python, as the repository's may not be readable for other users
HOST = """
import json, platform, sys
sys.path.insert(0, FOLDER)
from evals.code import sandbox, solution
from pathlib import Path
if reason := sandbox.find_obstacle():
    sys.exit(reason)
Path(FOLDER, "own").mkdir(mode=0o755)
Path(FOLDER, "own/filter").write_bytes(sandbox.build_filter(platform.machine()))
request = {
    "sandbox": sandbox.build_sandbox([]), "filter": FOLDER + "/own/filter",
    "runner": sandbox.wrap_as_nobody([sys.executable, "-I", "-c", Path(FOLDER, "evals/code/runner.py").read_text()]),
    "limits": {"memory_bytes": 200 * 2**20, "threads": 16, "cpu_s": 60},
}
if LOOP:
    if LOOP == "unsafe":
        request |= {"sandbox": [], "runner": ["setpriv", "--pdeathsig", "KILL", *request["runner"][-4:]]}
    looping = solution.Solution(request, "def loop():\\n    while True: pass", "loop", [[]])
    looping.receive(60)
    print(looping.process.pid, flush=True)
    looping.receive(600)
found = []
for _ in range(2):
    trying = solution.Solution(request, Path(FOLDER, "attempts.py").read_text(), "attempts", [[FOLDER]])
    trying.receive(60)
    found.append(solution.read_value(trying.receive(60)))
print(json.dumps(found))
"""
ATTEMPTS = """
import ctypes, mmap, os, resource, socket, threading
libc = ctypes.CDLL(None, use_errno=True)

def call(name, *arguments):
    if getattr(libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), name)

def write(path):
    os.close(os.open(path, os.O_RDWR | os.O_CREAT))

def threads(count):
    ended = threading.Event()
    try:
        made = [threading.Thread(target=ended.wait) for _ in range(count)]
        for thread in made: thread.start()
    finally:
        ended.set()

def attempts(folder):
    acts = {
        "calculate": lambda: 1 + 1,
        "a few threads": lambda: threads(4),
        "write to /": lambda: write("/leak"),
        "make a folder": lambda: os.mkdir("/leak"),
        "write to /tmp": lambda: write("/tmp/leak"),
        "write to shared memory": lambda: write("/dev/shm/leak"),
        "write to the system": lambda: write("/usr/leak"),
        "read the host": lambda: os.listdir(folder),
        "read passwords": lambda: open("/etc/passwd"),
        "read processes": lambda: os.listdir("/proc/1"),
        "mount": lambda: call("mount", b"tmpfs", b"/usr", b"tmpfs", 0, None),
        "new namespaces": lambda: call("unshare", 0x10020000),
        "a file in memory": lambda: os.memfd_create("x"),
        "shared memory of System V": lambda: call("shmget", 0, 2**20, 0o1600),
        "a process": lambda: os.fork() or os._exit(0),
        "a process of the C library": lambda: call("fork"),
        "a process without a thread's flags": lambda: call("syscall", CLONE, 17, 0, 0, 0, 0) or os._exit(0),
        "a program": lambda: os.posix_spawn("/bin/true", ["true"], {}),
        "much memory": lambda: bytearray(2**28),
        "much shared memory": lambda: mmap.mmap(-1, 2**28),
        "more memory by limit": lambda: resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33)),
        "many threads": lambda: threads(64),
        "the network": lambda: socket.create_connection(("127.0.0.1", 9), 1),
        "a server": lambda: socket.create_connection(("1.1.1.1", 53), 1),
        "a socket": lambda: socket.socket(),
        "memory in sockets": lambda: socket.socketpair(),
        "a file without a name": lambda: os.close(os.open("/tmp", os.O_RDWR | os.O_TMPFILE)),
        "a file beside its runner": lambda: write("/proc/self/leak"),
        "read a device": lambda: os.open("/dev/mem", os.O_RDONLY),
        "write a device": lambda: os.open("/dev/kmsg", os.O_WRONLY),
        "another process's memory": lambda: call("process_vm_readv", 1, None, 0, None, 0, 0),
        "trace another process": lambda: call("ptrace", 16, 1, 0, 0),
        "events of files": lambda: call("inotify_init"),
        "a queue of System V": lambda: call("msgget", 0, 0o1600),
        "semaphores of System V": lambda: call("semget", 0, 1, 0o1600),
        "another personality": lambda: call("personality", 0x0040000),
        "a message to all": lambda: call("syscall", 103 if CLONE == 56 else 116, 9, 0, 0),
        "kill one": lambda: os.kill(1, 9),
        "kill all": lambda: os.kill(-1, 9),
        "be root": lambda: os.setuid(0),
        "a key of the session": lambda: call("syscall", KEYS, b"user", b"x", b"x", 1, -3),
        "the keys of the session": lambda: call("syscall", KEYS + 2, 0, -3, 1),
        "another root folder": lambda: os.chroot("/usr"),
    }
    found = {}
    for name, act in acts.items():
        try:
            act()
            found[name] = "done"
        except (OSError, MemoryError, ValueError, RuntimeError) as error:
            found[name] = type(error).__name__
    passed = [number for number in range(470) if number not in ALLOWED and not refused(number)]
    return found | {"user": os.getuid(), "process": os.getpid(), "passed": passed}

def refused(number):
    # whether the filter answers a system call
    ctypes.set_errno(0)
    return libc.syscall(number, 0, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() in (1, 38)
"""


@pytest.fixture
def open_folder():
    """Make a folder that every user may read and write."""
    folder = Path(tempfile.mkdtemp(prefix="sandbox-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def host(folder: Path, user: int, loop: str = "") -> list[str]:
    python = shutil.which("python3", path="/usr/bin:/bin")
    if python is None:
        pytest.skip("the system has no python3, which every user could run")
    (folder / "evals/code").mkdir(parents=True)
    for name in ("sandbox", "system_calls", "solution", "runner", "__init__", "../__init__"):
        shutil.copy(SOURCE / f"{name}.py", folder / "evals/code" / f"{name}.py")
    machine = os.uname().machine
    constants = {"CLONE": sandbox.CLONE[machine], "KEYS": {"x86_64": 248, "aarch64": 217}[machine]}
    # and uretprobe and uprobe, which pass every filter and do nothing but for the kernel's own
    # probes
    constants["ALLOWED"] = [*system_calls.numbers(machine), sandbox.CLONE[machine], 335, 336]
    text = ATTEMPTS
    for name, number in constants.items():
        text = text.replace(name, str(number))
    (folder / "attempts.py").write_text(text)
    command = [python, "-I", "-B", "-c", f"FOLDER = {str(folder)!r}\nLOOP = {loop!r}\n{HOST}"]
    if user == os.geteuid():
        return command
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    return ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups", "--", *command]


def parents() -> dict[int, int]:
    parent_of = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parent_of[int(path.parent.name)] = int(parent)
    return parent_of


@needs_sandbox
@pytest.mark.parametrize(("user", "loop"), [(0, "safe"), (1234, "safe"), (0, "unsafe")])
def test_a_solution_dies_with_its_judge(open_folder, user, loop):
    process = subprocess.Popen(
        host(open_folder, user, loop), stdout=subprocess.PIPE, text=True, cwd="/"
    )
    assert process.stdout is not None
    started = process.stdout.readline()
    if not started and user:
        pytest.skip("no sandbox for ordinary users here")
    below = set()
    todo = [int(started)]
    parent_of = parents()
    while todo:
        pid = todo.pop()
        below.add(pid)
        todo += [child for child, parent in parent_of.items() if parent == pid]
    # bubblewrap, its init and the solution; without a sandbox the solution alone
    assert len(below) == (1 if loop == "unsafe" else 3)
    assert below <= parent_of.keys()
    # nothing can react to SIGKILL, so the kernel must end the solution
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while below & parents().keys() and time.monotonic() < deadline:
        time.sleep(0.05)
    survivors = below & parents().keys()
    for pid in survivors:
        os.kill(pid, signal.SIGKILL)
    # runs on without its judge
    assert not survivors


@needs_sandbox
@pytest.mark.parametrize("user", [0, 1234])
def test_nothing_leaves_a_sandbox_and_nothing_is_shared(open_folder, user):
    # two solutions, one after the other
    result = subprocess.run(
        host(open_folder, user), capture_output=True, text=True, timeout=300, cwd="/"
    )
    if "bwrap" in result.stderr and not result.stdout and user:
        pytest.skip(f"no sandbox for ordinary users here: {result.stderr.strip()}")
    assert result.returncode == 0, result.stderr
    for outcomes in json.loads(result.stdout):
        assert (outcomes.pop("user"), outcomes.pop("process"), outcomes.pop("passed")) == (
            65534,
            2,
            [],
        )
        allowed = {name for name, outcome in outcomes.items() if outcome == "done"}
        assert allowed == {"calculate", "a few threads"}, outcomes
    assert not Path("/leak").exists()


def test_no_sandbox_no_run(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"bwrap\) is not installed.*--unsafe-no-sandbox"):
        find_sandbox()
    assert find_sandbox(unsafe=True) == "none"


def test_an_unknown_processor_is_refused():
    with pytest.raises(ValueError, match=r"no sandbox on riscv64: .* known on x86_64, aarch64"):
        build_filter("riscv64")
