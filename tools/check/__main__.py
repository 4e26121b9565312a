"""Run a check by its name, such as `python -m tools.check engine tiny`."""

from __future__ import annotations

import importlib
import sys

CHECKS = ("structure", "engine", "cuda", "published", "train")


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in CHECKS:
        print(
            f"usage: python -m tools.check NAME [--help] ...\n\nNAME: {', '.join(CHECKS)}",
            file=sys.stderr,
        )
        raise SystemExit(0 if name in ("-h", "--help") else 2)
    # the other arguments are the check's own
    del sys.argv[1]
    importlib.import_module(f"tools.check.{name}").main()


if __name__ == "__main__":
    main()
