"""Make folders that tests of all pytest-xdist workers read, each once in a session.

`shared(name, make)` calls make(folder) in the first worker that needs it; the others wait, or fail
at once with the same error. No test may change such a folder: the session's end compares each with
what it was when it was made.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

# written by running code, by asking git, by engines beside a model, and by wandb after its run has
# ended
IGNORED = {"__pycache__", ".git", ".packed", "debug-core.log"}


@dataclass(frozen=True)
class Shared:
    """The shared folders of a session, below `root`."""

    root: Path

    def __call__(self, name: str, make: Callable[[Path], object]) -> Path:
        self.root.mkdir(parents=True, exist_ok=True)
        folder, marker, failed = (
            self.root / f"{name}{suffix}" for suffix in ("", ".done", ".failed")
        )
        with FileLock(self.root / f"{name}.lock"):
            if failed.exists():
                pytest.fail(f"{name} could not be made:\n{failed.read_text()}", pytrace=False)
            if not marker.exists():
                # of a worker that died while it made it
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                try:
                    make(folder)
                except (Exception, pytest.fail.Exception):
                    failed.write_text(traceback.format_exc())
                    raise
                marker.write_text(json.dumps(digest(folder)))
        return folder

    def changes(self) -> list[str]:
        """Return a line for each file that has changed since it was made."""
        lines = []
        for marker in sorted(self.root.glob("*.done")):
            was, now = json.loads(marker.read_text()), digest(marker.with_suffix(""))
            changed = sorted(
                name for name in was.keys() | now.keys() if was.get(name) != now.get(name)
            )
            lines += [f"{marker.stem}/{name} {kind(name, was, now)}" for name in changed]
        return lines


def kind(name: str, was: dict[str, str], now: dict[str, str]) -> str:
    if name not in was:
        return "was added"
    return "was changed" if name in now else "was deleted"


def digest(folder: Path) -> dict[str, str]:
    """Return relative path -> hash of the content and modification time."""
    hashes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not IGNORED & set(path.relative_to(folder).parts):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            hashes[str(path.relative_to(folder))] = f"{content} {path.stat().st_mtime_ns}"
    return hashes


def root_of(config: pytest.Config) -> Path:
    """Return the folder's root, the same in all workers and the controlling process."""
    base = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    return (base.parent if hasattr(config, "workerinput") else base) / "shared"


@pytest.fixture(scope="session")
def shared(pytestconfig):
    return Shared(root_of(pytestconfig))


CHANGES = pytest.StashKey[list[str]]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return
    session.config.stash[CHANGES] = changes = Shared(root_of(session.config)).changes()
    if changes and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if changes := config.stash.get(CHANGES, []):
        terminalreporter.section("A test changed a folder that all tests share", red=True)
        terminalreporter.write_line("\n".join(changes))
