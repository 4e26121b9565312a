"""What runs in the sandbox: a solution on its inputs. What it returns leaves as lines of JSON.

`python -c TEXT [FOLDER]`, the request on stdin, the reply on stdout; FOLDER holds the packages that solutions may
import. This file imports nothing of ours: its text is the command.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import resource
import sys
from _ast import PyCF_ONLY_AST
from collections.abc import Iterable, Sequence
from typing import Any

KINDS: tuple[Any, ...] = (int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
PART = 4096  # items
MAX_INT = 1 << 63  # of numbers that Python reads from text whatever its limit on digits
MAY_SHOW = (
    "Assign",
    "AnnAssign",
    "AugAssign",
    "For",
    "If",
    "With",
    "Try",
)  # where they name the function
EXACT = ("Fraction", "Decimal")  # names, as every import here delays every solution


def to_json(value: Any) -> Any:
    """Turn a value into JSON: most as it is, else {type: content}, which `solution.read_value` reads.

    A value that is not exactly of a builtin type becomes {"like": [type it extends, content]}.
    """
    kind = type(value)
    if value is None or kind in (bool, str, float) or (kind is int and -MAX_INT < value < MAX_INT):
        return value
    if kind is list:
        return value if are_json(value) else [to_json(item) for item in value]
    if kind in KINDS or kind.__name__ in EXACT:
        return {kind.__name__: encode_content(kind.__name__, value)}
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
        return {"like": [type(value).__name__ if type(value) in KINDS else "int", to_json(value)]}
    for builtin in KINDS:
        if isinstance(value, builtin):
            return {"like": [builtin.__name__, to_json(builtin(value))]}
    # [the builtin type that it extends or "items", content]
    return {
        "like": ["items", to_json(list(value))] if isinstance(value, Iterable) else ["object", None]
    }


def are_json(items: Sequence[Any]) -> bool:
    # whether JSON holds all items as they are, at the speed of C: an answer may hold 100 million numbers
    types = set(map(type, items))
    if int not in types:
        return types <= {bool, str, float, type(None)}
    return types <= {bool, int, float} and min(items) > -MAX_INT and max(items) < MAX_INT


def encode_content(kind: str, value: Any) -> Any:
    """Encode a value without the loss of a bit or a digit."""
    if kind == "int":
        return hex(value)
    if kind == "complex":
        return [value.real.hex(), value.imag.hex()]
    if kind == "bytes":
        return base64.b64encode(value).decode()
    if kind == "dict":
        return [[to_json(key), to_json(inner)] for key, inner in value.items()]
    if kind == "Fraction":
        return [hex(value.numerator), hex(value.denominator)]
    if kind == "Decimal":
        return str(value)
    return list(value) if are_json(value) else [to_json(item) for item in value]


def limit_process(limits: dict[str, int]) -> None:
    values = {
        "AS": limits["memory_bytes"],
        "STACK": limits["memory_bytes"],
        "CPU": limits["cpu_s"],
        "NPROC": limits["threads"],
        "NOFILE": 256,
        "FSIZE": 0,
        "CORE": 0,
    }
    for name, value in values.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def define_function(code: str, entry_point: str) -> Any:
    names: dict[str, Any] = {}
    program: Any = compile(code, "solution", "exec", PyCF_ONLY_AST)
    for statement in program.body:
        program.body = [statement]
        # input(), a wrong example, sys.exit(main()): what raises is passed over, as is what only
        # shows the function at work, all of which EvalPlus's sanitize takes away
        with contextlib.suppress(BaseException):
            compiled = compile(program, "solution", "exec")
            if entry_point not in names or not only_shows(
                statement, compiled.co_names, entry_point
            ):
                exec(compiled, names)
    return names[entry_point]


def only_shows(statement: Any, used: Sequence[str], entry_point: str) -> bool:
    """Tell whether a statement after the function is an example, a check or a loop that may not end."""
    kind = type(statement).__name__
    if kind in ("Expr", "Assert", "While"):
        return True
    bound = [getattr(target, "id", "") for target in getattr(statement, "targets", [])]
    return kind in MAY_SHOW and entry_point in used and entry_point not in bound


def solve() -> None:
    request = pickle.load(sys.stdin.buffer)
    reply = os.fdopen(os.dup(1), "w")

    def send(value: Any) -> None:
        """In parts, as the text of all would be another few times its size."""
        if type(value) in (list, tuple) and len(value) > PART:
            before, after = ("[", "]") if type(value) is list else ('{"tuple": [', "]}")
            for start in range(0, len(value), PART):
                part = [to_json(item) for item in value[start : start + PART]]
                print("," if start else before, json.dumps(part)[1:-1], sep="", end="", file=reply)
            print(after, file=reply, flush=True)
        else:
            print(json.dumps(to_json(value)), file=reply, flush=True)

    # at the start, and again once the function is defined
    send(None)
    nothing = os.open("/dev/null", os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    limit_process(request["limits"])
    function = define_function(request["code"], request["entry_point"])
    send(None)
    for arguments in request["inputs"]:
        send(function(*arguments))


if __name__ == "__main__":
    sys.path += sys.argv[1:]
    try:
        solve()
    finally:
        os._exit(0)  # whatever threads it has left
