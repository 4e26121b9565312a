"""Three problems in EvalPlus's format, and solutions that attack whoever runs them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from evals.code.sandbox import find_obstacle

missing = find_obstacle()
needs_sandbox = pytest.mark.skipif(bool(missing), reason=f"no sandbox here: {missing}")


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


def write_dataset(path: Path, problems: Sequence[dict[str, Any]] = PROBLEMS) -> Path:
    path.write_text("".join(json.dumps(p) + "\n" for p in problems))
    return path


ANSWER = "def double(x):\n    return 2 * x\n"
# each would also answer rightly if it got away with what it does first
HOSTILE = {
    "fork bomb": "import ctypes\nlibc = ctypes.CDLL(None)\ndef double(x):\n    while True:\n        libc.fork()\n",
    "endless loop": "def double(x):\n    while True:\n        try:\n            while True: pass\n"
    "        except BaseException: pass\n",
    "memory": "def double(x):\n    held = []\n    while True:\n        held.append(bytearray(b'x' * 2**27))\n",
    "threads": "import threading, time\ndef double(x):\n    while True:\n"
    "        threading.Thread(target=time.sleep, args=(60,)).start()\n",
    "kill everything": "import ctypes, os\ndef double(x):\n    for pid in (os.getppid(), -1, *range(2, 40000)):\n"
    "        ctypes.CDLL(None).kill(pid, 9)\n    os._exit(0)\n",
}
# each would be found right if it could decide, or read, what is right; what it returns is wrong
WALK = """
import gc, sys
def holders():
    frame = sys._getframe()
    while frame:
        yield frame.f_locals
        yield frame.f_globals
        frame = frame.f_back
    yield from (held for held in gc.get_objects() if type(held) is dict)
"""
LIES = {
    "an object equal to everything": "class A:\n    def __eq__(self, other): return True\n"
    "def double(x):\n    return A()\n",
    "an int equal to everything": "class A(int):\n    def __eq__(self, other): return True\n    __hash__ = None\n"
    "def double(x):\n    return A(0)\n",
    "a list of such": "class A(list):\n    def __eq__(self, other): return True\ndef double(x):\n    return A([x])\n",
    "what is expected": WALK + "def double(x):\n    for names in holders():\n"
    "        if names.get('expected') or names.get('exp'):\n"
    "            return names.get('exp') or names['expected'][0]\n",
    "the results": WALK + "def double(x):\n    for names in holders():\n"
    "        if 'stat' in names and 'details' in names:\n            import os\n"
    "            names['stat'].value, names['details'][0], names['progress'].value = 0, 1, 1\n"
    "            os._exit(0)\n    return 0\n",
    "the end": "import os\ndef double(x):\n    os._exit(0)\n",
    "a class that it changes": "import os\ndef double(x):\n    forged = (b'cfractions\\nFraction\\n(N}V__eq__\\n'\n"
    "              b'c__main__\\nlike\\nstbcfractions\\nFraction\\n(I0\\ntR.')\n"
    "    for file in range(256):\n        try: os.write(file, forged)\n        except OSError: pass\n"
    "    os._exit(0)\n",
    "a type that is none": "import os\ndef double(x):\n    for file in range(256):\n"
    '        try: os.write(file, b\'{"object": []}\\n{"like": ["object", null]}\\n\')\n'
    "        except OSError: pass\n    os._exit(0)\n",
    "a reply of its own": "import os\ndef double(x):\n    for file in range(256):\n        try: os.write(file, "
    "b'cunittest.mock\\nANY\\n.' * 4)\n        except OSError: pass\n    os._exit(0)\n",
}
FLOAT_LIES = {
    "np.allclose": "import numpy\nnumpy.allclose = lambda *a, **k: True\nnumpy.core = None\n"
    "def third(x):\n    return 0.0\n",
    "a float equal to everything": "class A(float):\n    def __eq__(self, other): return True\n"
    "def third(x):\n    return A(0)\n",
}
# values that are not of the expected type, but equal: right for EvalPlus, so right here
EQUAL = {
    "Counter": "from collections import Counter\ndef counts(x):\n    return Counter(x)\n",
    "NumPy numbers": "import numpy\ndef counts(x):\n    return {c: numpy.int64(x.count(c)) for c in x}\n",
    "Fraction and Decimal": "from fractions import Fraction\nfrom decimal import Decimal\n"
    "def counts(x):\n    return {c: Fraction(x.count(c)) if c == 'a' else Decimal(x.count(c)) for c in x}\n",
}
UNEQUAL = {
    "an iterator": "def counts(x):\n    return iter({c: x.count(c) for c in x})\n",
    "a generator": "def counts(x):\n    yield {c: x.count(c) for c in x}\n",
    "a list": "def counts(x):\n    return [(c, x.count(c)) for c in x]\n",
}


def escapes(victim: Path, new: Path, hidden: Path, port: int) -> dict[str, str]:
    """Return solutions that are right only if they reached something of this machine.

    hidden: a folder below none that the sandbox shows, readable without special rights.
    """
    acts = {
        "delete a file": f"os.unlink({str(victim)!r})",
        "write a file": f"os.open({str(new)!r}, os.O_RDWR | os.O_CREAT)",
        "read a file": f"os.open({str(victim)!r}, os.O_RDONLY)",
        "find a folder": f"os.lstat({str(hidden)!r})",
        "connect": f"socket.create_connection(('127.0.0.1', {port}), 2)",
        "read a key": "assert os.environ['OPENAI_API_KEY']",
    }
    return {
        name: f"import os, socket\ndef double(x):\n    {act}\n    return 2 * x\n"
        for name, act in acts.items()
    }
