"""Looks for flaky tests: the quick half several times in a row, beside busy processes.

    python -m tests.quiet [--times 10] [--beside 2] [--workers 4]

Prints what failed in which round; exit status 1 if anything did.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.tiers import UNIT
from tools.bench.decode import busy_programs

ROOT = Path(__file__).resolve().parents[1]


def failures(workers: int) -> list[str]:
    """Names of the quick tests that fail in one run; the exit status if pytest says nothing."""
    command = [sys.executable, "-m", "pytest", "-m", UNIT, "-n", str(workers), "--dist", "loadgroup"]
    command += ["--no-loadscope-reorder", "-rfE"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    named = re.findall(r"(?m)^(?:FAILED|ERROR) (\S+)", done.stdout)
    return named or ([f"exit status {done.returncode}"] if done.returncode else [])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.quiet", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--beside", type=int, default=2, help="busy processes")
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    failed = False
    with busy_programs(options.beside):
        for number in range(1, options.times + 1):
            start = time.monotonic()
            names = failures(options.workers)
            failed |= bool(names)
            verdict = "all passed" if not names else f"{len(names)} failed"
            print(
                f"round {number} of {options.times}: {verdict} in {time.monotonic() - start:.0f} s",
                flush=True,
            )
            for name in names:
                print(f"  {name}", flush=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
