"""`python -m tools.check NAME ...` runs a check, such as `python -m tools.check engine tiny`."""

from __future__ import annotations

import argparse
import runpy
import sys

CHECKS = ("structure", "engine", "cuda", "published", "quality", "train")


def main() -> None:
    parser = argparse.ArgumentParser("python -m tools.check")
    parser.add_argument("check", choices=CHECKS)
    name = parser.parse_args(sys.argv[1:2]).check
    del sys.argv[1]  # the other arguments are the check's own
    runpy.run_module(f"tools.check.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
