"""Sort tests into three tiers, so that a change waits only for what it can break.

- unit: no mark; under 5 s, no whole job. `make test` runs these.
- job: `pytest.mark.job`; every change (`make test-all`).
- rotate: `pytest.mark.rotate`, and every proof (proofs.py). `--rotate today` runs an eighth of
  them, after all others and in an order that changes by the day. None begins after ROTATE_UNTIL,
  a Unix time that `.ci/run` sets, nor one that durations.json expects to end more than GRACE_S
  later. `make nightly` runs all.

A test that is left out skips itself, and the summary names it.
"""

from __future__ import annotations

import functools
import json
import os
import time
import zlib
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest

# of tests that take a second or more, in s
DURATIONS = Path(__file__).with_name("durations.json")
EIGHTHS = 8
GRACE_S = 180.0
LEFT_OUT, TOO_LATE = "left out: rotates, not today's eighth", "left out: ROTATE_UNTIL is over"


def pytest_addoption(parser: pytest.Parser) -> None:
    choices = ("all", "today", "none", *map(str, range(EIGHTHS)))
    parser.addoption(
        "--rotate", choices=choices, default="all", help="which eighth of the rotating tests runs"
    )


def pytest_configure(config: pytest.Config) -> None:
    # before workers start, which inherit the day
    today()
    config.addinivalue_line("markers", "job: a whole job; `make test` leaves it out")
    config.addinivalue_line("markers", "rotate: every eighth day in CI, and in `make nightly`")


def rotates(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(mark) for mark in ("rotate", "proof"))


def is_chosen(name: str, rotate: str) -> bool:
    """Return whether a rotating test belongs to the eighth that `--rotate` asks for."""
    if rotate in ("all", "none"):
        return rotate == "all"
    eighth = today() % EIGHTHS if rotate == "today" else int(rotate)
    return zlib.crc32(name.encode()) % EIGHTHS == eighth


def today() -> int:
    """Return the day's ordinal, the same in all workers."""
    # kept in the environment: midnight may fall within a session
    return int(os.environ.setdefault("ROTATE_DAY", str(datetime.now(UTC).toordinal())))


def draw_place(name: str) -> int:
    """Return a rotating group's place in the order of today."""
    return zlib.crc32(f"{today()} {name}".encode())


@functools.cache
def durations() -> dict[str, float]:
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}


def is_in_time(name: str, now: float, until: float) -> bool:
    """Return whether a rotating test may begin now and is expected to end in time."""
    return now <= min(until, until + GRACE_S - durations().get(name, 0.0))


@pytest.hookimpl(tryfirst=True)  # before the cache of proofs is asked
def pytest_runtest_setup(item: pytest.Item) -> None:
    if not rotates(item):
        return
    # xdist appends the group
    name = item.nodeid.split("@tests/")[0]
    if not is_chosen(name, item.config.getoption("--rotate")):
        pytest.skip(LEFT_OUT)
    if not is_in_time(name, time.time(), float(os.environ.get("ROTATE_UNTIL", "inf"))):
        pytest.skip(TOO_LATE)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what did not run, by file."""
    stats = terminalreporter.stats
    for reason in (LEFT_OUT, TOO_LATE):
        left_out = Counter(
            report.nodeid.split("::")[0]
            for report in stats.get("skipped", [])
            if isinstance(report.longrepr, tuple) and reason in report.longrepr[2]
        )
        if left_out:
            terminalreporter.section(f"{left_out.total()} {reason}")
            terminalreporter.write_line(
                ", ".join(f"{file} {n}" for file, n in sorted(left_out.items()))
            )
