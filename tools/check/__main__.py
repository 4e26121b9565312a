"""`python -m tools.check NAME ...` runs tools/check/NAME.py, such as `python -m tools.check engine tiny`."""

from __future__ import annotations

import difflib
import runpy
import sys

CHECKS = ("engine", "int8", "smollm2", "structure")  # the modules that run as a command


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in CHECKS:
        near = difflib.get_close_matches(name, CHECKS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise SystemExit(f"usage: python -m tools.check {{{','.join(CHECKS)}}} ...: unknown check {name!r}{hint}")
    del sys.argv[1]
    runpy.run_module(f"tools.check.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
