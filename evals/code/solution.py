"""A solution in a sandbox of its own, as the process that judges it sees it: values that return, one by one.

What it returns becomes values of exact builtin types, where no solution has run. This file imports nothing of ours.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

# nothing of ours: keys of APIs stand in the environment
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "LANG": "C.UTF-8",
}
# of one returned value; the largest that is expected, of Mbpp/255, takes 0.6 GB
MAX_LINE_BYTES = 1 << 30
# values that compare as their builtin type does but are not of it, as EvalPlus accepts
# NumPy's and collections'
BUILTIN = (int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
KINDS = {kind.__name__: type(kind.__name__, (kind,), {}) for kind in BUILTIN}
CONTENTS: dict[
    str, Callable[[Any], Any]
] = {  # strings of tuples are shared: Mbpp/255 expects 10^8 of them
    "int": lambda text: int(text, 16),
    "complex": lambda parts: complex(*map(float.fromhex, parts)),
    "bytes": base64.b64decode,
    "Fraction": lambda parts: Fraction(*(int(part, 16) for part in parts)),
    "Decimal": Decimal,
    "tuple": lambda items: tuple(sys.intern(item) if type(item) is str else item for item in items),
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
}
# of other iterables: a set can be made of them
KINDS["items"] = type("items", (list,), {"__eq__": lambda *_: False})


class SandboxError(Exception):
    """A sandbox did not start, so no verdict would mean anything."""


def read_model_value(kind: str, value: Any) -> Any:
    """Read a value of a solution that is not exactly of a builtin type."""
    return KINDS[kind](value) if kind in KINDS else object()


def read_reference_value(kind: str, value: Any) -> Any:
    """Read such a value of a reference solution: as the builtin type, which is what is expected."""
    return object() if kind == "object" else value


def read_value(line: bytes, reading: Callable[[str, Any], Any] = read_model_value) -> Any:
    """Read the value that runner.py wrote as a line of JSON.

    Args:
        reading: `read_model_value` or `read_reference_value`, for what is not exactly of a builtin type.
    """

    def value_of(tagged: dict[str, Any]) -> Any:
        ((kind, content),) = tagged.items()
        return reading(*content) if kind == "like" else CONTENTS[kind](content)

    return json.loads(line, object_hook=value_of)


class Solution:
    """A process that ends with the one that made it.

    Args:
        request: of score.py: sandbox, runner, filter, limits.
    """

    def __init__(self, request: dict[str, Any], code: str, entry_point: str, inputs: list[Any]):
        with open(request["filter"], "rb") as rules:
            options = (
                [*request["sandbox"], "--seccomp", str(rules.fileno())]
                if request["sandbox"]
                else []
            )
            self.process = subprocess.Popen(
                [*options, *request["runner"]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[rules.fileno()],
                env=ENVIRONMENT,
            )
        job = {
            "code": code,
            "entry_point": entry_point,
            "inputs": inputs,
            "limits": request["limits"],
        }
        self.buffered = b""
        assert self.process.stdin is not None
        try:
            with self.process.stdin as pipe:
                # into the sandbox; nothing that comes out of it is unpickled
                pickle.dump(job, pipe)
            self.receive(60.0)
        except (OSError, EOFError, TimeoutError):
            raise SandboxError(f"a sandbox did not start: {shlex.join(options)}") from None

    def receive(self, limit_s: float) -> bytes:
        """Return the line that it sends next.

        Raises:
            EOFError: it has ended.
            TimeoutError: nothing within limit_s.
            ValueError: more than MAX_LINE_BYTES.
        """
        assert self.process.stdout is not None
        pipe = self.process.stdout.fileno()
        end_s = time.monotonic() + limit_s
        parts = [self.buffered]
        length = len(self.buffered)
        while b"\n" not in parts[-1]:
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not select.select([pipe], [], [], left_s)[0]:
                raise TimeoutError(f"nothing within {limit_s:.1f} s")
            if not (part := os.read(pipe, 1 << 20)):
                raise EOFError("the solution has ended")
            parts.append(part)
            if (length := length + len(part)) > MAX_LINE_BYTES:
                raise ValueError(f"a value of more than {MAX_LINE_BYTES} bytes")
        last, _, self.buffered = parts.pop().partition(b"\n")
        return b"".join([*parts, last])

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
