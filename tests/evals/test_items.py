"""An evaluation that is killed: what it has done is kept, only the rest is asked, and the bytes are the same."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evals.core.__main__ import main
from evals.core.evaluate import Settings
from evals.items import WINDOW, partial_beside
from evals.scorer import Source
from evals.watch import Watcher
from records.evals import About
from records.events import DONE, write_outcome
from records.files import read_lines
from records.job import Checkpoint, Evals, Job, JobSections, Training
from tests.evals.core.core_assets import CHOICE_ROWS, task, write_bundle, write_laneformer
from tests.evals.test_watch import save
from tests.records.lines import write_lines

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
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


class Dying(Watcher):
    """Exports by copying a folder; the first start of the command is killed, and the next is not."""

    model: Path
    statuses: list[int]

    def call(self, of: int, words: list[str], *locks: Any) -> int:
        if words[0] == "laneformer.hf.export":
            shutil.copytree(self.model, words[words.index("--out") + 1])
            return 0
        after = 10**6 if self.statuses else DIES_AFTER
        self.statuses.append(super().call(of, ["dies", str(after), *words], *locks))
        return self.statuses[-1]


@pytest.mark.job
def test_a_killed_evaluation_asks_what_is_left_and_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, bundle, asked = tmp_path / "run", tmp_path / "bundle", tmp_path / "asked"
    write_laneformer(tmp_path / "model")
    rows = [row | {"query": f"{i} {row['query']}"} for i, row in enumerate(CHOICE_ROWS * (ITEMS // 5))]
    write_lines(write_bundle(bundle, ["copa"]).file(task("copa")), rows)
    save(run, 10)
    write_outcome(run, 1, DONE, 10, "done")
    (tmp_path / "dies.py").write_text(DIES)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(__file__).resolve().parents[2]}")
    monkeypatch.setenv("ASKED", str(asked))
    monkeypatch.setattr("evals.watch.RETRY_AFTER_S", (0.0,))
    section = Evals(every_steps=10, device="cpu", commands=[f"core --bundle {bundle}"])
    watching = Dying(JobSections(Job(str(run)), Training(steps=10), Checkpoint(), evals=section))
    watching.model, watching.statuses = tmp_path / "model", []
    assert watching.watch(once=False, every_s=0.01) == 0
    assert watching.statuses == [-signal.SIGKILL, 0]
    assert len(asked.read_text()) == DIES_AFTER + ITEMS - WINDOW, "only what was not kept is asked again"
    (record,) = read_lines(run / "evals.jsonl")
    alone = tmp_path / "alone/evals.jsonl"
    whole = main(tmp_path / "model", bundle, Settings(), Source(device="cpu"), About(alone, 10))
    assert (run / record["items"]).read_bytes() == (alone.parent / whole["items"]).read_bytes()
    assert record["tasks"] == whole["tasks"]
    assert not (run / ".evals-watch").exists()


def test_half_a_window_left_by_a_crash_is_asked_again(tmp_path: Path) -> None:
    asked: list[int] = []

    def answer(left: Iterator[int]) -> Iterator[float]:
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
