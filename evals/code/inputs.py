"""MBPP+'s inputs as its functions take them: JSON has no tuples, sets and complex numbers.

By task, as in EvalPlus 0.3.1 (evalplus/data/mbpp.py, mbpp_deserialize_inputs).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Arguments = list[Any]


def make_tuples(value: Any, depth: int) -> Any:
    """Turn the lists at `depth` below a value into tuples."""
    if depth == 0:
        return tuple(value)
    return [make_tuples(item, depth - 1) for item in value]


def deep(value: Any) -> Any:
    return tuple(map(deep, value)) if isinstance(value, list) else value


def sets(items: list[Any]) -> list[Any]:
    return [set(item) if isinstance(item, list) and item else {} for item in items]


def make_inner_tuples(items: list[Any]) -> tuple[Any, ...]:
    return tuple(tuple(item) if isinstance(item, list) else item for item in items)


CHANGES: dict[tuple[int, ...], Callable[[Arguments], Any]] = {
    (2, 116, 132, 143, 222, 261, 273, 394, 399, 421, 424, 429, 470, 560, 579, 596, 616, 630, 726, 740, 744, 809): (
        lambda a: make_tuples(a, 1)
    ),
    (63, 64, 70, 94, 120, 237, 272, 299, 400, 409, 417, 438, 473, 614, 780): lambda a: make_tuples(a, 2),
    (75, 413, 444, 753): lambda a: [make_tuples(a[0], 1), a[1]],
    (106, 750): lambda a: [a[0], tuple(a[1])],
    (115,): lambda a: [sets(a[0])],
    (124,): lambda a: (float(a[0]), complex(a[1])),
    (250, 307, 405, 446, 617, 720, 763, 808): lambda a: [tuple(a[0]), *a[1:]],
    (252,): lambda a: [complex(a[0])],
    (259, 401, 445): lambda a: make_tuples(make_tuples(a, 2), 1),
    (278,): lambda a: [make_inner_tuples(a[0])],
    (580, 615, 791): deep,
    (722,): lambda a: [{key: tuple(value) for key, value in a[0].items()}, *a[1:]],
}  # fmt: skip
CHANGE_OF = {task: change for tasks, change in CHANGES.items() for task in tasks}


def convert_arguments(task_id: str, inputs: list[Arguments]) -> list[Any]:
    """Return the arguments of each test. task_id: "Mbpp/2", "HumanEval/0"."""
    prefix, _, number = task_id.partition("/")
    change = CHANGE_OF.get(int(number)) if prefix == "Mbpp" else None
    return inputs if change is None else [change(arguments) for arguments in inputs]
