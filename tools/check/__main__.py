"""`python -m tools.check NAME ...` runs a check, such as `python -m tools.check engine tiny`."""

from __future__ import annotations

import argparse
import runpy
import sys

# other words for the engine's check with these options
SPELLINGS = {"int8": ("--against", "int8"), "parity": ("--against", "published", "--prompts", "4")}

MODULES = {
    "structure": "tools.check.structure",
    "contained": "tools.check.contained",
    "train": "tools.check.train",
    "smollm2": "tests.smollm2",
}  # the latter makes a model for tests


def main() -> None:
    parser = argparse.ArgumentParser("python -m tools.check")
    parser.add_argument("check", choices=("engine", *SPELLINGS, *MODULES))
    name = parser.parse_args(sys.argv[1:2]).check  # the others are the check's own
    sys.argv[1:2] = SPELLINGS.get(name, ())
    runpy.run_module(MODULES.get(name, "tools.check.engine"), run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
