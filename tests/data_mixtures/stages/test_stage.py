"""Keys of units: of what the code does, not how it is written."""

from __future__ import annotations

import ast

import pytest

from data_mixtures.stages import stage

CODE = '''"""A module."""
import math

class Limit:
    low: int = 1
    """Where it begins."""

def double(value, times=2):
    """Twice."""
    if value is None:
        return [None, "", 1.0]
    return [math.floor(value) * times for _ in ()]
'''


def meaning(code: str) -> str:
    return repr(stage._meaning(ast.parse(code)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("A module.", "Another."),
        ("Where it begins.", "Where it ends."),
        ('    """Twice."""\n', ""),
        ("import math\n", "import math  # for floor\n\n\n# nothing\n"),
        ("(value, times=2)", "(\n    value,\n    times = 2,\n)"),
        ('""', "''"),
    ],
)
def test_comments_docstrings_and_formatting_make_nothing_again(old, new):
    assert meaning(CODE.replace(old, new, 1)) == meaning(CODE) != meaning(CODE + "\nx = 1")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("times=2", "times=3"),
        ("low: int = 1", "low: int = 0"),
        ("[None", "[0"),
        ('""', '"a"'),
        ("1.0", "1"),
        (" is None", " is not None"),
        ("floor", "ceil"),
        (" * ", " + "),
        ("[math.floor(value) * times for _ in ()]", "None"),
    ],
)
def test_other_code_makes_units_again(old, new):
    assert CODE.count(old) == 1 or old == '""'
    code = CODE.replace('[None, ""', f"[None, {new}") if old == '""' else CODE.replace(old, new)
    assert meaning(code) != meaning(CODE)
