"""Tests of the judge on a sandbox's lines, here from programs that are no solutions."""

import json
import sys
from fractions import Fraction

import pytest

from evals.code import runner, solution
from evals.code.solution import SandboxError, Solution, read_reference_value, read_value

BEGIN = "import sys, time\nsys.stdin.buffer.read()\nprint('null', flush=True)\n"
VALUES = [
    None, True, 7, -(2**64), 10**5000, 0.1, float("inf"), 1 + 2j, "\u2028", b"\0", [1, [2.0]], (1, ("a",)), {1, 2},
    frozenset("a"), {"a": (1, None), 2: [set()]}, Fraction(-1, 3), [True, 1, 1.0], (True, 1, 1.0), ["a", 2**64], [],
]  # fmt: skip
NO_VALUES = [
    b"",
    b"{}",
    b'{"object": []}',
    b'{"int": "x"}',
    b'{"a": 1, "b": 2}',
    b'{"like": 1}',
    b"[" * 10**5,
]


def start(program: str) -> Solution:
    runner = [sys.executable, "-c", BEGIN + program]
    request = {"sandbox": [], "filter": "/dev/null", "limits": {}, "runner": runner}
    return Solution(request, "", "f", [])


def test_a_value_arrives_as_it_left():
    for value in VALUES:
        arrived = read_value(json.dumps(runner.to_json(value)).encode(), read_reference_value)
        assert arrived == value
        # Python refuses to print so many digits
        if value != 10**5000:
            assert repr(arrived) == repr(value)


def test_what_is_no_value_is_an_error():
    for line in NO_VALUES:
        with pytest.raises((ValueError, KeyError, TypeError, RecursionError)):
            read_value(line)


def test_lines_have_limits_of_time_and_length(monkeypatch):
    slow = start("print(1, flush=True)\ntime.sleep(600)")
    assert read_value(slow.receive(60)) == 1
    with pytest.raises(TimeoutError, match=r"nothing within 0\.1 s"):
        slow.receive(0.1)
    slow.end()
    two = start("sys.stdout.write('1\\n2\\n')")
    assert [two.receive(60), two.receive(60)] == [b"1", b"2"]
    with pytest.raises(EOFError):
        two.receive(60)
    long = start("while True: sys.stdout.write('1' * 1000)")
    monkeypatch.setattr(solution, "MAX_LINE_BYTES", 10_000)
    with pytest.raises(ValueError, match="a value of more than 10000 bytes"):
        long.receive(60)
    long.end()


def test_a_process_that_does_not_begin_is_no_sandbox():
    request = {"sandbox": [], "filter": "/dev/null", "limits": {}, "runner": ["false"]}
    with pytest.raises(SandboxError, match="a sandbox did not start"):
        Solution(request, "", "f", [])


ADD = "def add(a, b):\n    return a + b"
AROUND = [  # what stands around a function and must not fail it
    "assert add(1, 2) == 4",
    "print(add(1, 2))",
    "add('a', 1)",
    "input()",
    "n = int(input())",
    "raise SystemExit",
    "if __name__ == '__main__':\n    main()",
    "import no_such_package",
    "for line in open('input.txt'):\n    add(line)",
    "def main():\n    while True: pass\nmain()",
    "while True:\n    try: add(int(input()), 1)\n    except: pass",
    "for i in iter(int, 1):\n    add(i, 1)",
    "x = add(*(i for i in iter(int, 1)))",
    "if add(1, 1) != 3:\n    exit(1)",
    "def main():\n    print(add(int(input()), 1))\nmain()",
    "import sys, unittest\nsys.exit(unittest.main())",
]
NEEDED = [  # (what a function may need, a name that it defines)
    ("MOD, INF = 10**9 + 7, float('inf')", "INF"),
    ("DIRS = [(0, 1)]\nDIRS += [(1, 0)]", "DIRS"),
    ("memo = {}\nmemo[0] = 1", "memo"),
    ("try:\n    import nothing\nexcept ImportError:\n    comb = None", "comb"),
    ("for i in range(3):\n    last = i", "last"),
    ("from functools import cache\n\n@cache\ndef one():\n    pass", "one"),
]


def test_a_function_is_defined_whatever_stands_around_it():
    for code in AROUND:
        # before the function an endless loop would never reach it
        endless = "while True" in code
        for program in (
            f"{ADD}\n\n{code}\n\nlater = 1",
            f"{'' if endless else code}\n{ADD}\n\nlater = 1",
        ):
            function = runner.define_function(program, "add")
            assert (function(1, 2), function.__globals__["later"]) == (3, 1), program
    twice = runner.define_function(
        f"{ADD}\nimport functools\nadd = functools.cache(add)\ncopy = add", "add"
    )
    # what binds the function again is no example
    assert hasattr(twice, "cache_info")
    for needed, name in NEEDED:
        for program in (f"{needed}\n\n{ADD}", f"{ADD}\n\n{needed}"):
            assert name in runner.define_function(program, "add").__globals__
    with pytest.raises(KeyError):
        runner.define_function("def other(): pass", "add")
