"""Three tiers of tests, so that a change waits for what it can break and no longer.

- unit: no mark; under 5 s, no whole job. `make test` runs these.
- job: `pytest.mark.job`; every change (`make test-all`).
- rotate: `pytest.mark.rotate`, and every proof (proofs.py). `--rotate today` runs an eighth of them, chosen by a hash
  of the test's name and the day, after all others; none of them begins after ROTATE_UNTIL, a Unix time that `.ci/run`
  sets. `make nightly` runs all.

A test that is left out skips itself, and the summary names it.
"""

from __future__ import annotations

import os
import time
import zlib
from collections import Counter
from datetime import UTC, datetime

import pytest

EIGHTHS = 8
UNIT_LIMIT_S = 5.0
LEFT_OUT, TOO_LATE = "left out: rotates, not today's eighth", "left out: ROTATE_UNTIL is over"


def pytest_addoption(parser: pytest.Parser) -> None:
    choices = ("all", "today", "none", *map(str, range(EIGHTHS)))
    parser.addoption(
        "--rotate", choices=choices, default="all", help="which eighth of the rotating tests runs"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "job: a whole job; `make test` leaves it out")
    config.addinivalue_line("markers", "rotate: every eighth day in CI, and in `make nightly`")


def rotates(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(mark) for mark in ("rotate", "proof"))


def is_chosen(name: str, rotate: str) -> bool:
    """Whether a rotating test of this name belongs to the eighth that `--rotate` asks for."""
    today = datetime.now(UTC).toordinal() % EIGHTHS
    eighth = {"all": None, "none": -1, "today": today}.get(rotate, int(rotate) if rotate.isdigit() else -1)
    return eighth is None or zlib.crc32(name.encode()) % EIGHTHS == eighth


@pytest.hookimpl(tryfirst=True)  # before the cache of proofs is asked
def pytest_runtest_setup(item: pytest.Item) -> None:
    if not rotates(item):
        return
    name = item.nodeid.split("@tests/")[0]  # xdist appends the group
    if not is_chosen(name, item.config.getoption("--rotate")):
        pytest.skip(LEFT_OUT)
    if time.time() > float(os.environ.get("ROTATE_UNTIL", "inf")):
        pytest.skip(TOO_LATE)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What did not run, by file, and the unit tests that are too long to be units."""
    stats = terminalreporter.stats
    for reason in (LEFT_OUT, TOO_LATE):
        left_out = Counter(
            report.nodeid.split("::")[0]
            for report in stats.get("skipped", [])
            if isinstance(report.longrepr, tuple) and reason in report.longrepr[2]
        )
        if left_out:
            terminalreporter.section(f"{left_out.total()} {reason}")
            terminalreporter.write_line(", ".join(f"{file} {n}" for file, n in sorted(left_out.items())))
