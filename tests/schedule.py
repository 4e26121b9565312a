"""Order the tests that pytest-xdist starts: groups by file, longest first, rotating ones last.

A group runs in one worker. Tests that use a fixture of module scope stay together; the others of a
long file are cut into groups of about GROUP_S.
`--no-loadscope-reorder` keeps xdist from sorting groups by their number of tests.
`pytest --write-durations` updates durations.json.
"""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.tiers import DURATIONS, draw_place, rotates

GROUPS = "groups.json"
GROUP_S = 30.0
# of a test that durations.json does not name
UNKNOWN_S, UNKNOWN_JOB_S = 0.1, 5.0
# begins the name of a group of tests that rotate
ROTATING = "?"
# shorter tests are not listed
LEAST_S = 1.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-durations", action="store_true", help=f"update {DURATIONS.name} from this run"
    )


@pytest.hookimpl(trylast=True)  # after tests were deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # set by xdist in its workers
    if not getattr(config.option, "loadgroup", False):
        return
    durations: dict[str, float] = json.loads(DURATIONS.read_text())
    # of a group
    seconds: defaultdict[str, float] = defaultdict(float)
    group_of: dict[pytest.Item, str] = {}
    # of the group of a file that is being filled
    number: defaultdict[str, int] = defaultdict(int)
    for item in items:
        file = group = f"{ROTATING if rotates(item) else ''}{item.nodeid.split('::')[0]}"
        job = item.get_closest_marker("job") is not None
        duration = durations.get(item.nodeid, UNKNOWN_JOB_S if job else UNKNOWN_S)
        if not shares_a_fixture(item):
            if number[file] == 0 or seconds[f"{file}#{number[file]}"] + duration > GROUP_S:
                number[file] += 1
            group = f"{file}#{number[file]}"
        seconds[group] += duration
        group_of[item] = group
    items.sort(key=lambda item: place(group_of[item], seconds[group_of[item]]))
    # to a file for the scheduler: pytest 9.2 with xdist 3.8 loses the marks of `--dist loadgroup`
    folder = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    (folder / GROUPS).write_text(
        json.dumps({item.nodeid: group for item, group in group_of.items()})
    )


def place(group: str, seconds: float) -> tuple[bool, float, str]:
    """Return a group's sort key: the longest first, and behind them what rotates."""
    is_rotating = group[0] == ROTATING
    return is_rotating, draw_place(group) if is_rotating else -seconds, group


class GroupScheduling(LoadScopeScheduling):
    """Run all tests of a group in one worker; start groups in the order of collection."""

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)
        self.group_of: dict[str, str] = {}

    def _split_scope(self, nodeid: str) -> str:
        # all workers collected the same
        if not self.group_of:
            folder = self.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
            self.group_of = json.loads(next(folder.glob(f"popen-*/{GROUPS}")).read_text())
        return self.group_of[nodeid]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    return GroupScheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


def shares_a_fixture(item: pytest.Item) -> bool:
    """Return whether the test uses a fixture of module, class or package scope."""
    by_name = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    return any(
        fixtures[-1].scope in ("module", "class", "package") for fixtures in by_name.values()
    )


class Stopwatch:
    """Sum set-up, call and tear-down times of each test, in the controlling process."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.skipped: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.skipped:
            self.skipped.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        DURATIONS.write_text(
            merge_durations(json.loads(DURATIONS.read_text()), self.seconds, self.skipped)
        )


def merge_durations(listed: dict[str, float], measured: dict[str, float], skipped: set[str]) -> str:
    """Return the file's content: measured tests replace listed ones unless skipped."""
    ran = {name: round(seconds, 1) for name, seconds in measured.items() if name not in skipped}
    merged = {name: seconds for name, seconds in {**listed, **ran}.items() if seconds >= LEAST_S}
    return json.dumps(dict(sorted(merged.items())), indent=1) + "\n"


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Stopwatch())
