"""What runs in the sandbox with EvalPlus's own Python: a solution on its inputs, or EvalPlus's sanitize.

A solution is given its inputs and never the outputs that are expected of it. What it returns leaves as lines of
JSON, and is compared elsewhere (evals/code/judge.py), so it can neither read nor decide what is right. This
file imports nothing of ours: its text is the command. `python -c TEXT solve|sanitize`, the request on stdin,
the reply on stdout.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import resource
import sys
from collections.abc import Iterable
from typing import Any

KINDS: tuple[Any, ...] = (int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
EXACT = ("Fraction", "Decimal")  # names, as every import here delays every solution


def plain(value: Any) -> Any:
    """A value as JSON: None, bool, str and list as they are, others as {type: content}.

    Of what is not exactly of a builtin type, {"like": [the builtin type that it extends or "items", content]}.
    """
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is list:
        return [plain(item) for item in value]
    if kind in KINDS or kind.__name__ in EXACT:
        return {kind.__name__: content(kind.__name__, value)}
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
        return {"like": [type(value).__name__ if type(value) in KINDS else "int", plain(value)]}
    for builtin in KINDS:
        if isinstance(value, builtin):
            return {"like": [builtin.__name__, plain(builtin(value))]}
    return {"like": ["items", plain(list(value))] if isinstance(value, Iterable) else ["object", None]}


def content(kind: str, value: Any) -> Any:
    """What stands behind the name of a type; numbers as text, which loses no bit and no digit."""
    if kind == "int":
        return hex(value)
    if kind == "float":
        return value.hex()
    if kind == "complex":
        return [value.real.hex(), value.imag.hex()]
    if kind == "bytes":
        return base64.b64encode(value).decode()
    if kind == "dict":
        return [[plain(key), plain(held)] for key, held in value.items()]
    return str(value) if kind in EXACT else [plain(item) for item in value]


def limit_process(limits: dict[str, int]) -> None:
    for name, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_STACK, limits["memory_bytes"]),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_NPROC, limits["threads"]),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(name, (value, value))


def solve() -> None:
    """Send None at the start, None once the solution defines its function, then what that
    returns for each input.
    """
    request = pickle.load(sys.stdin.buffer)
    reply = os.fdopen(os.dup(1), "w")

    def send(value: Any) -> None:
        print(json.dumps(plain(value)), file=reply, flush=True)

    send(None)
    nothing = os.open("/dev/null", os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    limit_process(request["limits"])
    names: dict[str, Any] = {}
    exec(request["code"], names)
    function = names[request["entry_point"]]
    send(None)
    for arguments in request["inputs"]:
        send(function(*arguments))


def sanitize() -> None:
    """EvalPlus's sanitize of each text, in a process with a time limit: it parses O(lines^2) times.

    null for a text that takes longer, or kills the parser.
    """
    import multiprocessing

    from evalplus.sanitize import sanitize as evalplus_sanitize

    def work(text: str, entry_point: str, sender: Any) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # it prints every text that does not parse
        sender.send(evalplus_sanitize(text, entry_point))

    request, done = json.load(sys.stdin), []
    for row in request["selected"]:
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
    print(json.dumps(done), flush=True)


if __name__ == "__main__":
    try:
        {"solve": solve, "sanitize": sanitize}[sys.argv[1]]()
    finally:
        if sys.argv[1] == "solve":
            os._exit(0)  # whatever threads it has left
