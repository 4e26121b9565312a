"""Tries alone what failed beside others, as PyTorch's own CI does: a test of real processes that fails once in ten
thousand must not throw away a run of half an hour, and must not be hidden either.

    python -m tests.again

Follows a run of pytest in this folder that exited with 1. At most MOST tests are tried again, in one process, with
nothing beside them. Exit status 0 if all pass now: their names are the last line that is printed, as flaky. A fault
fails twice; `python -m tests.quiet` searches for tests that do not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 3
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")


def main() -> int:
    names = sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []
    if not 0 < len(names) <= MOST:
        print(f"{len(names)} tests failed; 1 to {MOST} would be tried again alone")
        return 1
    print(f"tried again alone: {', '.join(names)}", flush=True)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rsfE", *names]
    status = subprocess.run(command).returncode
    print(f"{'FLAKY, passed alone' if status == 0 else 'FAILED twice'}: {', '.join(names)}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
