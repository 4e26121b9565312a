"""Tests of the benchmarks' shared parts: crashes, hangs, trial order, file, command line."""

from __future__ import annotations

import os
import time

import pytest

from tools.bench.harness import Candidate, append_section


class Child:
    """An engine that prints, fails, crashes or hangs, as it is told."""

    def pid(self):
        return os.getpid()

    def echo(self, x):
        print("noise of a library")
        return x

    def fail(self):
        raise RuntimeError("broken")

    def crash(self):
        os._exit(7)

    def hang(self):
        time.sleep(60)


@pytest.fixture
def candidate():
    process = Candidate("child", Child)
    yield process
    process.close()


def test_a_candidate_that_crashes_or_hangs_loses_one_command_alone(candidate):
    first = candidate.ask("pid")
    with pytest.raises(RuntimeError, match="child: its process ended with status 7"):
        candidate.ask("crash")
    second = candidate.ask("pid")
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"no answer within 0 s; its process was killed"):
        candidate.ask("hang", timeout_s=0.2)
    assert time.monotonic() - start < 30
    assert len({first, second, candidate.ask("pid")}) == 3


def test_what_is_printed_is_no_answer_and_errors_are_answers(candidate):
    assert candidate.ask("echo", x=[1]) == [1]
    pid = candidate.ask("pid")
    with pytest.raises(RuntimeError, match="RuntimeError: broken"):
        candidate.ask("fail")
    assert candidate.ask("pid") == pid, "an error that leaves the process usable does not cost it"


def test_a_file_grows_by_sections(tmp_path):
    path = tmp_path / "new" / "page.md"
    for part in ("## one", "## two"):
        append_section(path, part, "# Title")
    assert path.read_text() == "# Title\n\n## one\n\n## two\n"
    assert list(path.parent.iterdir()) == [path]
