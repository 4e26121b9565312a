"""A worker that hangs ends the requests; one that is slow, or was paused, does not."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from laneformer.engine.cpu import processes
from laneformer.tensors import Tensor
from tests.laneformer.engine.assets import (
    engine_of,
    random_ids,
    random_model,
    small_config,
    tensors_of,
)
from tests.laneformer.engine.test_processes import (
    ENDLESS,
    LONG,
    LOST_S,
    follow,
    is_alive,
    shared_files,
    workers,
)

pytestmark = pytest.mark.rotate  # lanes over processes are to be removed
SILENT_S = 2.0
HUNG = rf"has shown no sign of life for {SILENT_S:g} s"


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(processes, "SILENT_S", SILENT_S)


@pytest.fixture
def bounded() -> Iterator[Callable[[Callable[[], None]], None]]:
    """What it gets is called after the test, or when that takes too long, lest it waits without end."""
    ends: list[Callable[[], None]] = []
    late = threading.Timer(SILENT_S + 2 * LOST_S, lambda: [end() for end in ends])
    late.start()
    yield ends.append
    in_time = late.is_alive()
    late.cancel()
    for end in ends:
        end()
    assert in_time


def until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline_s = time.monotonic() + LOST_S
    while not condition():
        assert time.monotonic() < deadline_s, otherwise
        time.sleep(0.01)


def held_memory() -> set[str]:
    """Files of shared memory, also of this process's that have no name."""
    opened = {f"{path} {os.readlink(path)}" for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    return {str(path) for path in shared_files()} | {name for name in opened if "memfd:laneformer" in name}


def test_a_hung_worker_ends_the_request(bounded):
    before = held_memory()
    engine = engine_of(random_model(small_config(**LONG)), threads=1, processes=3)
    bounded(engine.close)
    pids = [process.pid for process in workers(engine)]
    stream = engine.stream([3], **ENDLESS)
    next(stream)
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(
        RuntimeError, match=rf"process 2 of 3 \(pid {pids[1]}\) {HUNG}: the request has ended"
    ):
        list(stream)
    until(lambda: not any(map(is_alive, pids)), "a worker still runs")
    with pytest.raises(RuntimeError, match=rf"this engine is closed: process 2 of 3 .* {HUNG}"):
        engine.generate([3], max_new_tokens=2)
    engine.close()
    assert held_memory() <= before


def test_a_hung_worker_ends_requests_side_by_side(bounded):
    engine = engine_of(random_model(small_config(**LONG)), threads=1, processes=2)
    bounded(engine.close)
    with engine.batch() as batch:
        tickets = [batch.join([first_id], **ENDLESS) for first_id in (3, 4, 5)]
        while not {update.ticket for update in batch.updates(1.0)} >= {*tickets}:
            pass
        os.kill(workers(engine)[0].pid, signal.SIGSTOP)
        with pytest.raises(RuntimeError, match=rf"process 1 of 2 .* {HUNG}: the request has ended"):
            follow(batch, SILENT_S + LOST_S)


def stop_here() -> Mapping[str, Tensor]:
    os.kill(os.getpid(), signal.SIGSTOP)
    raise AssertionError("a test has continued this worker")


def test_a_worker_that_hangs_while_it_loads(monkeypatch, bounded):
    model, start = random_model(small_config()), processes.Workers.start
    monkeypatch.setattr(
        processes.Workers, "start", lambda it, *model: (bounded(it.close), start(it, *model))[1]
    )
    with pytest.raises(RuntimeError, match=rf"process 1 of 2 .* {HUNG} while it loaded the model"):
        processes.cpu_decoder(
            model.config, tensors_of(model), "fp32", processes=2, threads=1, source=stop_here
        )


def test_a_worker_that_cannot_be_killed(monkeypatch):
    monkeypatch.setattr(processes, "KILLED_S", 0.2)
    engine = engine_of(random_model(small_config()), threads=1, processes=2)
    stuck = workers(engine)[0]
    kill = stuck.kill
    os.kill(stuck.pid, signal.SIGSTOP)
    stuck.kill = lambda: None
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(LOST_S)
    kill()
    assert not closing.is_alive()
    stuck.wait()


def test_a_prompt_that_takes_longer_is_no_error():
    model = random_model(small_config(num_hidden_layers=2, broadcast_delay=0, swa_layers=[]), seed=4)
    ids = random_ids(model.config, 40)
    with engine_of(model, threads=1) as engine:
        expected = engine.generate(ids, max_new_tokens=1)
    with engine_of(model, threads=1, processes=2) as engine:
        engine._decoder.set_latency(SILENT_S / 2)
        began_s = time.monotonic()
        assert engine.generate(ids, max_new_tokens=1) == expected  # one pass
        assert time.monotonic() - began_s > 2 * SILENT_S


def test_a_pause_of_all_processes_is_no_error():
    script = """
        import json, sys
        from laneformer.config import LaneformerConfig
        from laneformer.engine import Engine
        from laneformer.engine.cpu import processes

        processes.SILENT_S = float(sys.argv[2])
        with Engine.random(LaneformerConfig(**json.loads(sys.argv[1])), threads=1, processes=2) as engine:
            stream = engine.stream([3], max_new_tokens=19_000, ignore_eos=True)
            next(stream)
            print(*(process.pid for process in engine._decoder._workers.processes), flush=True)
            sys.stdin.readline()
            for _ in range(10):
                next(stream)
            stream.close()
            print(len(engine.generate([3], max_new_tokens=4, ignore_eos=True)))
    """
    arguments = [json.dumps(small_config(**LONG).to_dict()), str(SILENT_S)]
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    rank_0 = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pids = [rank_0.pid, *map(int, rank_0.stdout.readline().split())]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2 * SILENT_S)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
        time.sleep(SILENT_S / 8)  # rank 0 looks for beats before the worker goes on
    assert rank_0.communicate("\n", timeout=300)[0] == "4\n"
    assert rank_0.returncode == 0


def test_a_worker_ends_when_rank_0_ends_in_the_middle_of_a_message():
    message = pickle.dumps(b"x" * 1000)[:500]
    command = [sys.executable, "-m", "laneformer.engine.cpu.worker"]
    assert subprocess.run(command, input=message, stdout=subprocess.PIPE, timeout=20).returncode == 0
