"""An evaluation that is killed: what it has done is kept, only the rest is asked, and the bytes are the same."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evals.core.__main__ import main
from evals.core.evaluate import Settings
from evals.items import WINDOW, partial_beside
from evals.scorer import Source
from records.evals import About
from records.files import read_lines
from tests.evals.core.core_assets import CHOICE_ROWS, task, write_bundle, write_laneformer
from tests.records.lines import write_lines

ITEMS, DIES_AFTER = 300, 280
# python -m dies AFTER MODULE ...: ends itself as the kernel ends what takes too much memory
DIES = """
import os, runpy, signal, sys
from evals.scorer.engine import EngineScorer
score, after = EngineScorer.score, int(sys.argv.pop(1))

def counted(self, items):
    for number, found in enumerate(score(self, items), 1):
        with open(os.environ["ASKED"], "a") as file:
            file.write("x")
        if number == after:
            os.kill(os.getpid(), signal.SIGKILL)
        yield found

EngineScorer.score = counted
runpy.run_module(sys.argv.pop(1) + ".__main__", run_name="__main__", alter_sys=True)
"""


@pytest.mark.job
def test_a_killed_evaluation_asks_what_is_left_and_gives_the_same_bytes(tmp_path):
    bundle, asked, outs = tmp_path / "bundle", tmp_path / "asked", [tmp_path / "run/x", tmp_path / "alone/x"]
    write_laneformer(tmp_path / "model")
    rows = [row | {"query": f"{i} {row['query']}"} for i, row in enumerate(CHOICE_ROWS * (ITEMS // 5))]
    write_lines(write_bundle(bundle, ["copa"]).file(task("copa")), rows)
    (tmp_path / "dies.py").write_text(DIES)
    paths = f"{tmp_path}{os.pathsep}{Path(__file__).resolve().parents[2]}"
    env = {**os.environ, "PYTHONPATH": paths, "ASKED": str(asked)}
    options = ["--bundle", bundle, "--device", "cpu", "--step", "10", "--out", outs[0]]
    for after, status in ((DIES_AFTER, -signal.SIGKILL), (10**6, 0)):
        command = [sys.executable, "-m", "dies", str(after), "evals.core", tmp_path / "model", *options]
        assert subprocess.run(command, env=env).returncode == status
    assert len(asked.read_text()) == DIES_AFTER + ITEMS - WINDOW, "only what was not kept is asked again"
    main(tmp_path / "model", bundle, Settings(), Source(device="cpu"), About(outs[1], 10))
    records = [record for out in outs for record in read_lines(out)]
    items, expected = (
        (out.parent / each["items"]).read_bytes() for out, each in zip(outs, records, strict=True)
    )
    assert items == expected
    assert records[0]["tasks"] == records[1]["tasks"]
    assert sorted(path.name for path in outs[0].parent.iterdir()) == ["items", "x"], "nothing else stays"


def test_half_a_window_left_by_a_crash_is_asked_again(tmp_path):
    asked = []

    def answer(left):
        for item in left:
            asked.append(item)
            yield item / 3

    first = partial_beside(tmp_path / "evals.jsonl", "core", "model")
    assert first.path is not None
    assert first.complete("copa", range(4), answer, together=2) == [0, 1 / 3, 2 / 3, 1.0]
    lines = first.path.read_text().splitlines()
    first.path.write_text(f"{lines[0]}\n{lines[1][:20]}")
    asked.clear()
    for _ in range(2):
        again = partial_beside(tmp_path / "evals.jsonl", "core", "model")
        assert again.complete("copa", range(4), answer, together=2) == [0, 1 / 3, 2 / 3, 1.0]
    assert asked == [2, 3]
    assert partial_beside(tmp_path / "evals.jsonl", "core", "another model").answers == {}
    again.remove()
    assert not list(tmp_path.iterdir())
