"""Tests of our rules of what is right, by hand and by EvalPlus's own code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evals.code.inputs import CHANGE_OF, convert_arguments
from evals.code.oracle import Oracle

EVALPLUS = Path(sys.prefix) / "evalplus"
needs_evalplus = pytest.mark.skipif(not EVALPLUS.exists(), reason="no EvalPlus here: make extras")
NAN, INF = float("nan"), float("inf")
VALUES = [  # expected, right, wrong
    (2, [2, 2.0, True + 1], [2 + 1e-9, "2", None, -2, [2]]),
    (True, [True, 1, 1.0], [False, None, "True"]),
    (None, [None], [0, "", False, []]),
    (0.5, [0.5, 0.5 + 9e-7], [0.5 + 2e-6, "0.5", 0.5 + 0.1j]),
    (INF, [INF], [-INF, 1e300]),
    (2 + 1j, [2 + 1j], [2, 2 - 1j]),
    ("ab", ["ab"], ["ab ", "AB", ["a", "b"], b"ab"]),
    ([0.5, 1e9], [[0.5, 1e9 + 50]], [(0.5, 1e9), [0.5], [0.5, 1e9 + 200], [[0.5, 1e9]]]),
    ([1, 0.5], [[1, 0.5]], [[1, 0.5 + 1e-8], (1, 0.5)]),
    ((1, 2), [(1, 2), (1.0, 2)], [[1, 2], (2, 1), (1,)]),
    ({"a": 1}, [{"a": 1}, {"a": True}], [{}, {"a": 2}, [("a", 1)], {"a": 1, "b": 0}]),
    ([], [[]], [(), None, [0]]),
]
RULES = [  # of a data set, a function, a tolerance
    *(("humaneval", "f", 0, *row) for row in VALUES),
    ("humaneval", "f", 0.1, 2.0, [2.05, 2], [2.2, None]),
    (
        "humaneval",
        "f",
        0.1,
        [[0.5], [1.5]],
        [[[0.5], [1.55]]],
        [[[0.5], [1.7]], [[0.5]], [0.5, 1.5]],
    ),
    ("mbpp", "Diff", 0, [1, 2], [[2, 1, 1], {1, 2}], [[1], [1, 2, 3], None]),
    ("humaneval", "Diff", 0, [1, 2], [[1, 2]], [[2, 1]]),
    ("mbpp", "check_str", 0, True, [True, "match"], [False, None]),
    ("humaneval", "check_str", 0, True, [True], ["match", None]),
    ("mbpp", "are_equivalent", 0, False, [False, True, 7], []),
    ("mbpp", "sum_div", 0, 7, [7, 0], [1, None]),
    ("mbpp", "surface_Area", 0, 33, [33], [34, None]),
    ("mbpp", "digit_distance_nums", 0, 12, [12], [11, None]),
    ("humaneval", "find_zero", 0, 1, [], [1]),
]
ARGUMENTS = {"surface_Area": [3, 4], "digit_distance_nums": [1, 256]}  # else one
INPUTS = [  # task, an input as JSON, as its function takes it
    (2, [[1, 2], [3]], [(1, 2), (3,)]), (63, [[[1, 2]]], [[(1, 2)]]), (115, [[[1, 2], [], 3]], [[{1, 2}, {}, {}]]),
    (124, ["1.5", "2+1j"], (1.5, 2 + 1j)), (3, [[1]], [[1]]),
]  # fmt: skip


def theirs(lines: list[str]):
    script = Path(__file__).with_name("evalplus_verdicts.py")
    env = {**os.environ, "PYTHONPATH": str(EVALPLUS)}
    command = [sys.executable, script]
    text = "\n".join(lines)
    process = subprocess.run(
        command, input=text, env=env, capture_output=True, text=True, timeout=1100
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return [json.loads(line) for line in process.stdout.splitlines()]


def ours(
    dataset: str, entry_point: str, arguments: list, expected: list, returned: list, atol: float
) -> bool:
    oracle = Oracle(dataset, entry_point, atol)
    try:
        return all(map(oracle.right, returned, arguments, expected))
    except Exception:
        return False


def test_the_rules_by_hand():
    for dataset, name, atol, expected, right, wrong in RULES:
        arguments = ARGUMENTS.get(name, [8])
        verdicts = [
            ours(dataset, name, [arguments], [expected], [value], atol) for value in right + wrong
        ]
        assert verdicts == [True] * len(right) + [False] * len(wrong), (dataset, name, expected)
    for task, json_input, converted in INPUTS:
        assert repr(convert_arguments(f"Mbpp/{task}", [json_input])) == repr([converted]), task
    assert convert_arguments("HumanEval/2", [[[1]]]) == [[[1]]]


@needs_evalplus
@pytest.mark.rotate
def test_evalplus_finds_the_same():
    cases = []
    verdicts = []
    for dataset, name, atol, expected, right, wrong in RULES:
        arguments = [ARGUMENTS.get(name, [8])]
        for values, verdict in ((right, True), (wrong, False)):
            cases += [(dataset, name, arguments, [expected], [value], atol) for value in values]
            verdicts += [verdict] * len(values)
    # a test that expects floats sets the tolerance of those behind it
    for order in ([0.5, 1], [1, 0.5]):
        case = ("humaneval", "f", [[1], [1]], order, [value + 5e-7 for value in order], 0)
        cases.append(case)
        verdicts.append(ours(*case))
    evalplus = theirs(
        [json.dumps([d, e, repr(a), repr(x), repr(r), atol]) for d, e, a, x, r, atol in cases]
    )
    assert [c for c, a, b in zip(cases, evalplus, verdicts, strict=True) if a != b] == []


@needs_evalplus
@pytest.mark.rotate
def test_inputs_of_mbpp():
    shapes = {
        124: [["1.5", "2+1j"], ["-3", "1j"]], 252: [["1+2j"]], 115: [[[[1, 2], [], {}, 3]]],
        722: [[{"a": [1, 2]}, 3, 4]], 307: [[[1, [2]], 1, 50]],
    }  # fmt: skip
    flat = {106, 750, 250, 405, 446, 617, 720, 763, 808, 2, 75, 413, 444, 753}
    cases = []
    for task in (*CHANGE_OF, 3):
        lists = [[[1, 2], [3]], [[4, 5]]] if task in flat else [[[[1, 2]], [[3], [4]]], [[[5, 6]]]]
        cases.append((f"Mbpp/{task}", shapes.get(task) or [[lists, lists]]))
    evalplus = theirs([json.dumps({"task": task, "inputs": inputs}) for task, inputs in cases])
    for (task, inputs), text in zip(cases, evalplus, strict=True):
        assert repr(convert_arguments(task, inputs)) == text, task
