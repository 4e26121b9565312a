"""What the benchmarks share: processes that crash, hang or print, the order of trials, the
file, and the command line.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

from tools.bench import __main__ as commands
from tools.bench.harness import ROOT, Candidate, alternate, append_section, spread

CHILD = """
import os, time
from tools.bench.harness import serve
def answer(do, **arguments):
    if do == "print": print("noise of a library"); return arguments
    if do == "fail": raise RuntimeError("broken")
    if do == "crash": os.write(2, b"a last word"); os._exit(7)
    if do == "hang": time.sleep(60)
    return os.getpid()
serve(answer)
"""


@pytest.fixture
def candidate():
    made = Candidate("child", ["-c", CHILD])
    yield made
    made.close()


def test_a_candidate_that_crashes_or_hangs_loses_one_command_alone(candidate):
    first = candidate.ask("pid")
    with pytest.raises(
        RuntimeError, match=r"child: its process ended with status 7; its last lines:\na last word"
    ):
        candidate.ask("crash")
    second = candidate.ask("pid")
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"no answer within 0 s; its process was killed"):
        candidate.ask("hang", timeout_s=0.2)
    assert time.monotonic() - start < 30
    assert len({first, second, candidate.ask("pid")}) == 3


def test_answers_are_json_whatever_is_printed_and_errors_are_answers(candidate):
    assert candidate.ask("print", x=[1]) == {"x": [1]}
    pid = candidate.ask("pid")
    with pytest.raises(RuntimeError, match="RuntimeError: broken"):
        candidate.ask("fail")
    assert candidate.ask("pid") == pid, "an error that leaves the process usable does not cost it"


def test_every_second_round_is_reversed():
    assert list(alternate("abc", 3)) == [["a", "b", "c"], ["c", "b", "a"], ["a", "b", "c"]]


def test_spread_of_known_values():
    assert spread([float(n) for n in range(101)]) == {"median": 50, "p10": 10, "p90": 90}


def test_a_file_grows_by_sections(tmp_path):
    path = tmp_path / "new" / "page.md"
    for part in ("## one", "## two"):
        append_section(path, part, "# Title")
    assert path.read_text() == "# Title\n\n## one\n\n## two\n"
    assert list(path.parent.iterdir()) == [path]


def test_the_command_names_its_benchmarks():
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", "decoed"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    listed = re.findall(r"^  ([\w-]+) ", done.stderr, re.MULTILINE)
    assert listed == list(commands.BENCHMARKS)
    assert all((ROOT / f"tools/bench/{name.replace('-', '_')}.py").is_file() for name in listed)
