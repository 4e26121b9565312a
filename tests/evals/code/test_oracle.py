"""Our rules of what is right against EvalPlus's own code, on right answers and on wrong ones that are near them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evals.code.inputs import CHANGE_OF, arguments_of
from evals.code.oracle import AS_SETS, NOT_NONE, Oracle

EVALPLUS = Path(sys.prefix) / "evalplus"
needs_evalplus = pytest.mark.skipif(not EVALPLUS.exists(), reason="no EvalPlus here: make extras")
Case = tuple[str, str, list[Any], list[Any], list[Any], float]


def theirs(lines: list[str]) -> list[Any]:
    script = Path(__file__).with_name("evalplus_verdicts.py")
    env = {**os.environ, "PYTHONPATH": str(EVALPLUS)}
    command, text = [sys.executable, script], "\n".join(lines)
    done = subprocess.run(command, input=text, env=env, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def ours(
    dataset: str, entry_point: str, arguments: list, expected: list, returned: list, atol: float
) -> bool:
    oracle = Oracle(dataset, entry_point, atol)
    try:
        return all(map(oracle.right, returned, arguments, expected))
    except Exception:
        return False


def assert_same_verdicts(cases: list[Case]) -> None:
    texts = [json.dumps([d, e, repr(a), repr(x), repr(r), atol]) for d, e, a, x, r, atol in cases]
    wanted, got = theirs(texts), [ours(*case) for case in cases]
    differing = [case for case, a, b in zip(cases, wanted, got, strict=True) if a != b]
    assert not differing
    assert {True, False} == set(wanted)


def near(value: Any, rng: random.Random) -> Iterator[Any]:
    """The value, and others that some rule may take for it."""
    yield value
    yield None
    if isinstance(value, bool):
        yield from (int(value), not value)
    elif isinstance(value, int | float):
        yield from (float(value), value + 1, -value, value * (1 + 5e-8), value + 5e-7, value + 2e-6)
        yield from (str(value), complex(value))
    elif isinstance(value, str):
        yield from (value + " ", value[:-1], value.upper(), list(value))
    elif isinstance(value, list | tuple):
        other = list if isinstance(value, tuple) else tuple
        yield from (other(value), value[::-1], value[:-1], value + type(value)([0]), type(value)([value]))
        if value:
            place = rng.randrange(len(value))
            for changed in near(value[place], rng):
                yield type(value)([*value[:place], changed, *value[place + 1 :]])
    elif isinstance(value, dict):
        yield from (dict(list(value.items())[1:]), list(value.items()), {**value, "more": 0})
    elif isinstance(value, set):
        yield from (sorted(value, key=repr), set(list(value)[1:]), frozenset(value))


EXPECTED = [
    True, 7, -(2**70), 0.1, 1e-9, 0.0, float("inf"), "ab", None, [1, 2, 3], [], [0.5, 2.0], (0.5, 1e9), [[0.5], [1.5]],
    {"a": 1}, {1, 2}, [1, 0.5], [True, 2], ["a", "b"], 2 + 1j, [None],
]  # fmt: skip
SPECIAL = {
    "are_equivalent": ([[36, 57]], [False]), "sum_div": ([[8]], [7]), "surface_Area": ([[3, 4]], [33]),
    "digit_distance_nums": ([[1, 256]], [12]), "f": ([[1]], [1]),
    **{name: ([[1]], [[3, 4, 4]]) for name in AS_SETS[:2]}, **{name: ([["x"]], [True]) for name in NOT_NONE},
}  # fmt: skip
RULES: list[tuple[str, str, float, Any, list[Any], list[Any]]] = [  # ..., expected, right, wrong
    ("humaneval", "f", 0, 2, [2, 2.0, True + 1], [2 + 1e-9, "2", None]),
    ("humaneval", "f", 0.1, 2.0, [2.05, 2], [2.2]),
    ("humaneval", "f", 0, 0.5, [0.5 + 9e-7], [0.5 + 2e-6, "0.5"]),
    ("humaneval", "f", 0, [0.5, 1e9], [[0.5, 1e9 + 50]], [(0.5, 1e9), [0.5], [0.5, 1e9 + 200]]),
    ("humaneval", "f", 0, (1, 2), [(1, 2)], [[1, 2], (2, 1)]),
    ("mbpp", "Diff", 0, [1, 2], [[2, 1, 1], {1, 2}], [[1], [1, 2, 3]]),
    ("humaneval", "Diff", 0, [1, 2], [[1, 2]], [[2, 1]]),
    ("mbpp", "check_str", 0, True, [True, "match"], [False, None]),
    ("mbpp", "sum_div", 0, 7, [7, 0], [1]),
    ("humaneval", "find_zero", 0, 1, [], [1]),
]
INPUTS = [  # task, an input as JSON, as its function takes it
    (2, [[1, 2], [3]], [(1, 2), (3,)]), (63, [[[1, 2]]], [[(1, 2)]]), (115, [[[1, 2], [], 3]], [[{1, 2}, {}, {}]]),
    (124, ["1.5", "2+1j"], (1.5, 2 + 1j)), (3, [[1]], [[1]]),
]  # fmt: skip


def test_the_rules_by_hand() -> None:
    for dataset, name, atol, expected, right, wrong in RULES:
        verdicts = [ours(dataset, name, [[8]], [expected], [value], atol) for value in right + wrong]
        assert verdicts == [True] * len(right) + [False] * len(wrong), (dataset, name, expected)
    for task, sent, taken in INPUTS:
        assert repr(arguments_of(f"Mbpp/{task}", [sent])) == repr([taken]), task
    assert arguments_of("HumanEval/2", [[[1]]]) == [[[1]]]


@needs_evalplus
@pytest.mark.rotate
def test_verdicts_on_values_near_the_expected_one() -> None:
    rng = random.Random(7)
    cases: list[Case] = []
    for expected in EXPECTED:
        for returned in near(expected, rng):
            cases.append(("humaneval", "f", [[1]], [expected], [returned], rng.choice([0, 0, 1e-6, 0.1])))
    # a test that expects floats sets the tolerance of those behind it
    for order in ([0.5, 1], [1, 0.5]):
        cases.append(("humaneval", "f", [[1], [1]], order, [value + 5e-7 for value in order], 0))
    for name, (arguments, expected) in SPECIAL.items():
        for returned in [*near(expected[0], rng), 33, 39, 12, 7, 0, {3, 4}]:
            for dataset in ("mbpp", "humaneval"):
                cases.append((dataset, name, arguments, expected, [returned], 0))
    assert_same_verdicts(rng.sample(cases, 300))


@needs_evalplus
@pytest.mark.rotate
def test_inputs_of_mbpp() -> None:
    shapes = {
        124: [["1.5", "2+1j"], ["-3", "1j"]], 252: [["1+2j"]], 115: [[[[1, 2], [], {}, 3]]],
        722: [[{"a": [1, 2]}, 3, 4]], 307: [[[1, [2]], 1, 50]],
    }  # fmt: skip
    flat = {106, 750, 250, 405, 446, 617, 720, 763, 808, 2, 75, 413, 444, 753}
    cases = []
    for task in (*CHANGE_OF, 3):
        lists = [[[1, 2], [3]], [[4, 5]]] if task in flat else [[[[1, 2]], [[3], [4]]], [[[5, 6]]]]
        cases.append((f"Mbpp/{task}", shapes.get(task) or [[lists, lists]]))
    wanted = theirs([json.dumps({"task": task, "inputs": inputs}) for task, inputs in cases])
    for (task, inputs), text in zip(cases, wanted, strict=True):
        assert repr(arguments_of(task, inputs)) == text, task
