"""Workers end with their parent, even where that had no time to tell them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.evals.core.core_assets import write_laneformer

POOL = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from records.workers import end_with_parent

if __name__ == "__main__":
    with ProcessPoolExecutor(2, get_context("{context}"), end_with_parent) as pool:
        list(pool.map(str, range(9)))
        print(*pool._processes, flush=True)
        input()
"""
SCORERS = """
import multiprocessing, pathlib
from evals.scorer import Source, open_scorer

if __name__ == "__main__":
    scorer = open_scorer(pathlib.Path("{folder}"), Source(device="cpu,cpu"))
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    input()
"""


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("what", ["spawn", "forkserver", "scorers"])
def test_workers_of_a_killed_process_end(tmp_path: Path, what: str) -> None:
    write_laneformer(tmp_path / "model")
    script = tmp_path / "parent.py"
    script.write_text(
        SCORERS.format(folder=tmp_path / "model") if what == "scorers" else POOL.format(context=what)
    )
    command = [sys.executable, str(script)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
    ) as parent:
        assert parent.stdout is not None
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        assert not any(map(gone, workers))
        parent.kill()
    deadline = time.monotonic() + 120
    while not all(map(gone, workers)):
        assert time.monotonic() < deadline, f"of {workers}, some live on"
        time.sleep(0.05)
