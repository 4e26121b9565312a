"""Workers end with their parent, even where that had no time to tell them."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

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


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_of_a_killed_process_end(tmp_path, context):
    script = tmp_path / "parent.py"
    script.write_text(POOL.format(context=context))
    command = [sys.executable, str(script)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=env, text=True, **pipes) as parent:  # type: ignore[call-overload]
        workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        assert all(worker.is_running() for worker in workers)
        parent.kill()
    _, alive = psutil.wait_procs(workers, timeout=120)
    assert not [worker for worker in alive if worker.status() != psutil.STATUS_ZOMBIE]
