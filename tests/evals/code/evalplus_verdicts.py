"""EvalPlus's own verdicts; it runs with its folder on the path, cases as JSON lines on stdin.

    PYTHONPATH=.venv/evalplus python evalplus_verdicts.py < cases > verdicts

A case: dataset, entry point, arguments of each test, expected and returned values as the text of a
Python expression, tolerance. A verdict: whether a solution with these values passes. For an object
{"task", "inputs"}: the text of its inputs as EvalPlus gives them to a solution.
"""

import json
import sys
import types

for missing in ("wget", "tempdir", "appdirs"):  # imported for downloads
    sys.modules[missing] = types.ModuleType(missing)
sys.modules["tempdir"].TempDir = None
sys.modules["appdirs"].user_cache_dir = lambda name: "/nonexistent"

from evalplus.data.mbpp import mbpp_deserialize_inputs  # noqa: E402
from evalplus.eval import untrusted_check  # noqa: E402

NAMES = {"nan": float("nan"), "inf": float("inf")}


def verdict(dataset, entry_point, arguments, expected, returned, atol):
    code = "nan, inf = float('nan'), float('inf')\n"
    code += f"values = iter({returned})\ndef {entry_point}(*arguments):\n    return next(values)\n"
    inputs = eval(arguments, dict(NAMES))
    expected_values = eval(expected, dict(NAMES))
    status, _ = untrusted_check(
        dataset, code, inputs, entry_point, expected_values, atol, [0.0] * len(inputs), True
    )
    return status == "pass"


if __name__ == "__main__":
    for line in sys.stdin:
        case = json.loads(line)
        if isinstance(case, dict):
            print(
                json.dumps(repr(mbpp_deserialize_inputs(case["task"], case["inputs"]))), flush=True
            )
        else:
            print(json.dumps(verdict(*case)), flush=True)
