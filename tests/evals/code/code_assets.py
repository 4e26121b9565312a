"""A data set of three problems in EvalPlus's format, and solutions that attack whoever runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evals.code.sandbox import KINDS, why_not
from evals.code.score import evalplus_environment

needs_evalplus = pytest.mark.skipif(
    not evalplus_environment().exists(), reason="no EvalPlus here: python -m evals.code --setup"
)
missing_sandboxes = {kind: why_not(kind) for kind in KINDS}
needs_sandbox = pytest.mark.skipif(all(missing_sandboxes.values()), reason=f"no sandbox here: {missing_sandboxes}")


def problem(number: int, name: str, body: str, base: list[Any], plus: list[Any]) -> dict[str, Any]:
    return {
        "task_id": f"HumanEval/{number}",
        "prompt": f'def {name}(x):\n    """The {name} of x."""\n',
        "entry_point": name,
        "canonical_solution": f"    {body}\n",
        "test": "",
        "contract": "",
        "base_input": base,
        "plus_input": plus,
        "atol": 0,
    }


PROBLEMS = [
    problem(900, "double", "return 2 * x", [[1]], [[-3]]),
    problem(901, "absolute", "return abs(x)", [[1], [2]], [[-3]]),
    problem(902, "triple", "return 3 * x", [[1]], [[0], [-1]]),
]


def write_dataset(path: Path) -> Path:
    path.write_text("".join(json.dumps(p) + "\n" for p in PROBLEMS))
    return path


LIBC = "import ctypes, os, time\nlibc = ctypes.CDLL(None)\n"  # EvalPlus's guard takes os.kill, not this
ANSWER = "def double(x):\n    return 2 * x\n"
# each would also answer rightly if it got away with what it does first
HOSTILE = {
    "fork bomb": LIBC + "def double(x):\n    while True:\n        libc.fork()\n",
    "fork bomb that leaves": LIBC
    + "def double(x):\n    for _ in range(1000):\n        if libc.fork() == 0:\n"
    + "            libc.setsid()\n            libc.prctl(1, 0)\n            while True:\n                libc.fork()\n"
    + "    raise SystemExit\n",
    "endless loop": "def double(x):\n    while True:\n        try:\n            while True: pass\n"
    "        except BaseException: pass\n",
    "memory": "def double(x):\n    held = []\n    while True:\n        held.append(bytearray(b'x' * 2**27))\n",
    "memory of many": LIBC
    + "def double(x):\n    for _ in range(12): libc.fork()\n    held = bytearray(b'x' * 2**30)\n    time.sleep(60)\n",
    "huge file": "import os\ndef double(x):\n    f = os.open('/tmp/huge', os.O_RDWR | os.O_CREAT)\n"
    "    while True: os.write(f, b'x' * 2**20)\n",
    "kill the parent": LIBC + "def double(x):\n    libc.kill(os.getppid(), 9)\n    libc.kill(-1, 9)\n    os._exit(0)\n",
    "kill everything": LIBC
    + "def double(x):\n    for pid in range(2, 40000):\n        libc.kill(pid, 9)\n    os._exit(0)\n",
    "undo the mounts": LIBC + "def double(x):\n    assert libc.umount2(b'/tmp', 2) == 0\n    return 2 * x\n",
}


def deletes(path: Path) -> str:
    """A solution that is right only if it could delete a file, through the C library as well."""
    return LIBC + f"def double(x):\n    assert libc.unlink({str(path).encode()!r}) == 0\n    return 2 * x\n"


def writes(path: Path) -> str:
    """A solution that is right only if it could write a file."""
    return f"import os\ndef double(x):\n    os.open({str(path)!r}, os.O_RDWR | os.O_CREAT)\n    return 2 * x\n"


def reads(path: Path) -> str:
    """A solution that is right only if it could read a file."""
    return f"import os\ndef double(x):\n    os.open({str(path)!r}, os.O_RDONLY)\n    return 2 * x\n"


def connects(port: int) -> str:
    """A solution that is right only if it reached a port of this machine."""
    return f"import socket\ndef double(x):\n    socket.create_connection(('127.0.0.1', {port}), 2)\n    return 2 * x\n"
