"""Tests that shared folders are made once, failures are not repeated, changes are seen."""

from __future__ import annotations

import pytest

from tests.shared import Shared

TESTS = """
import pytest
pytestmark = pytest.mark.parametrize("number", range(4))

@pytest.fixture(scope="session")
def data(shared):
    def make(folder):
        with open("made.log", "a") as log:
            log.write("made\\n")
        if {fails}:
            raise RuntimeError("no data today")
        (folder / "file").write_text("content")
    return shared("data", make)

def test_reads(data, number):
    assert (data / "file").exists()
    if {writes} and number == 3:
        (data / "file").write_text("content")  # the same bytes: written again all the same
        (data / "new").touch()
"""


@pytest.mark.parametrize("options", [(), ("-n", "3")])
@pytest.mark.parametrize(("fails", "writes"), [(False, False), (True, False), (False, True)])
def test_made_once_whatever_happens(pytester, options, fails, writes):
    pytester.makepyfile(TESTS.format(fails=fails, writes=writes))
    outcome = pytester.runpytest_subprocess("-p", "tests.shared", *options)
    assert (pytester.path / "made.log").read_text() == "made\n"
    assert outcome.ret == (fails or writes)
    outcome.assert_outcomes(passed=0 if fails else 4, errors=4 if fails else 0)
    if fails:
        assert outcome.stdout.str().count("RuntimeError: no data today") >= 4
    if writes:
        outcome.stdout.fnmatch_lines(["data/file was changed", "data/new was added"])


def test_a_half_made_folder_is_made_again(tmp_path):
    # by a killed worker, whose lock the system has released
    (tmp_path / "data").mkdir()
    (tmp_path / "data/half").touch()
    folder = Shared(tmp_path)("data", lambda folder: (folder / "whole").touch())
    assert [path.name for path in folder.iterdir()] == ["whole"]
