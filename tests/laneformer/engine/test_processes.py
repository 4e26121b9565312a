"""Lanes in several processes: the same bits as in one, and what happens when a process is lost.

The processes outnumber the cores in some of these, so waits also meet a peer that is not running.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from laneformer.engine import Batch, Cancelled, Engine
from laneformer.engine.cpu.processes import threads_of_each, whole_lanes
from tests.laneformer.engine.assets import engine_of, random_ids, random_model, small_config
from tests.laneformer.engine.goldens import mask_of
from tests.laneformer.engine.test_joined import collect, tokens_of

LONG = {"max_position_embeddings": 20_000, "vocab_size": 264}
ENDLESS = {"max_new_tokens": 19_000, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "seed": 7, "repetition_penalty": 1.1, "logprobs": 3}
pytestmark = pytest.mark.rotate  # lanes over processes are to be removed
LOST_S = 5.0  # generous: a shared machine may stop for a while


def results(engine: Engine, ids: list[int]) -> list[object]:
    """Of several requests in a row, some of which start from what others have left in the cache."""
    found: list[object] = [engine.generate(ids[:length], max_new_tokens=12) for length in (1, 100, len(ids))]
    found.append(engine.generate_detailed(ids[:40], max_new_tokens=12, **SAMPLED))
    found.append(engine.generate_batch([ids[:5], ids[:9], ids[3:8]], max_new_tokens=8, temperature=1.0))
    found.append(engine.generate(ids[:30] * 2, max_new_tokens=12, speculate=4))
    scores = engine.logprobs(ids, top=2)
    found += [scores.logprobs.tolist(), scores.top_ids.tolist(), engine.logits(ids[:20]).tolist()]
    found.append(engine._partials(ids[:150], [0, 7, 140]).tolist())
    return found


def workers(engine: Engine) -> list[subprocess.Popen[bytes]]:
    return engine._decoder._workers.processes


def compare(numbers: tuple[int, ...], dtype: str = "auto", **overrides: object) -> None:
    model = random_model(small_config(**{"max_position_embeddings": 400, **overrides}), seed=1, dtype="bf16")
    ids = random_ids(model.config, 300)
    with engine_of(model, threads=1, dtype=dtype) as engine:
        expected = results(engine, ids)
    for processes in numbers:
        with engine_of(model, threads=1, dtype=dtype, processes=processes) as engine:
            assert engine.threads == processes
            assert results(engine, ids) == expected, f"{processes} processes"


@pytest.mark.parametrize(
    ("delay", "head"), [(0, "vocab_parallel"), (1, "replicate"), (2, "lane"), (4, "replicate")]
)
def test_the_same_bits_of_every_model(head, delay):
    compare((2, 4), lm_head_type=head, broadcast_delay=delay)
    compare((2,), "int8", lm_head_type=head, broadcast_delay=delay)


@pytest.mark.parametrize(
    "overrides",
    [
        {"use_attention_comm": False, "use_mlp_comm": False},
        {"tie_word_embeddings": True},
        {"flush": True, "first_late_layer": 2},
    ],
)
def test_the_same_bits_without_joins_and_with_tied_embeddings(overrides):
    compare((2, 3), **overrides)
    compare((3,), "int8", **overrides)


def test_groups_of_threads_share_lanes_within_a_process():
    model = random_model(small_config(num_lanes=2, intermediate_size=352), seed=2, dtype="bf16")
    ids = random_ids(model.config, 40)
    with engine_of(model, threads=1) as engine:
        expected = engine.logits(ids).tolist()
    with engine_of(model, threads=3, processes=2) as engine:
        assert engine.threads == 6
        assert engine.logits(ids).tolist() == expected


def late_masks(engine: Engine) -> list[int]:
    """Tokens of a request whose masks come late, so that all threads sleep before each draw, beside another one."""
    vocab, ids = engine.config.vocab_size, list[int]()
    with engine.batch() as batch:
        other = batch.join([5, 6], max_new_tokens=3, logprobs=1)
        ticket, running = batch.join([3], max_new_tokens=6, masked=True), {0, 1}
        while running:
            for update in batch.updates(0.05):
                ids += [token.id for token in update.tokens] if update.ticket == ticket else []
                running -= {update.ticket - other} if update.finish_reason else set()
            if 1 in running:
                batch.allow(ticket, len(ids), mask_of(range(len(ids), vocab, 7), vocab))
    return ids


def test_masks_that_come_late():
    model = random_model(small_config())
    with engine_of(model, threads=1) as one, engine_of(model, threads=1, processes=2) as two:
        expected = late_masks(one)
        assert len(expected) == 6
        assert late_masks(two) == expected


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_workers_sleep_between_requests():
    def busy_s(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    with engine_of(random_model(small_config()), threads=1, processes=2) as engine:
        pid = workers(engine)[0].pid
        for _ in range(3):
            engine.generate([3], max_new_tokens=5)
        before_s = busy_s(pid)
        time.sleep(1.0)
        assert busy_s(pid) - before_s < 0.05


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RLIMIT_AS")
def test_a_worker_without_memory_for_a_cache_ends_that_request_alone():
    import resource

    model = random_model(small_config(max_position_embeddings=1 << 20))
    with engine_of(model, threads=1, processes=3, cache_bytes=1 << 50) as engine:
        expected = engine.generate([3, 5], max_new_tokens=12)
        pid, any_size = workers(engine)[1].pid, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        used = 4096 * int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        resource.prlimit(pid, resource.RLIMIT_AS, (used + (1 << 20), resource.RLIM_INFINITY))
        with engine.batch() as batch:
            tickets = [batch.join(ids, max_new_tokens=12, reuse_prefix=False) for ids in ([3, 5], [7])]
            updates = collect(batch, *tickets)
            assert [token.id for token in tokens_of(updates[tickets[0]])] == expected
            assert "1048576 positions need more than" in str(updates[tickets[1]][-1].error)
            resource.prlimit(pid, resource.RLIMIT_AS, any_size)
            tickets = [batch.join(ids, max_new_tokens=12, reuse_prefix=False) for ids in ([3, 5], [7])]
            updates = collect(batch, *tickets)
            assert [token.id for token in tokens_of(updates[tickets[0]])] == expected
            assert updates[tickets[1]][-1].error is None


def test_a_cancelled_request_leaves_the_next_one_as_it_is():
    model = random_model(small_config(**LONG))
    with engine_of(model, threads=1) as engine:
        expected = engine.generate([3, 5], max_new_tokens=20)
    with engine_of(model, threads=1, processes=2) as engine:
        for _ in range(2):
            stream = engine.stream([3, 5], **ENDLESS)
            assert [next(stream) for _ in range(10)] == expected[:10]
            stream.close()
        threading.Timer(0.1, engine.cancel).start()
        with pytest.raises(Cancelled):
            engine.generate([3], **ENDLESS)
        assert engine.generate([3, 5], max_new_tokens=20) == expected
        threading.Timer(0.1, engine.close).start()
        with pytest.raises(Cancelled):
            engine.generate([3], **ENDLESS)


def test_a_lost_worker_ends_the_request():
    engine = engine_of(random_model(small_config(**LONG)), threads=1, processes=2)
    lost = workers(engine)[0]
    stream = engine.stream([3], **ENDLESS)
    next(stream)
    began_s = time.monotonic()
    lost.kill()
    with pytest.raises(RuntimeError, match=rf"process 1 of 2 \(pid {lost.pid}\) was killed by SIGKILL"):
        list(stream)
    assert time.monotonic() - began_s < LOST_S
    with pytest.raises(RuntimeError, match=r"this engine is closed: process 1 of 2 .* load the model again"):
        engine.generate([3], max_new_tokens=2)
    engine.close()


def follow(batch: Batch, most_s: float) -> None:
    until_s = time.monotonic() + most_s
    while time.monotonic() < until_s:
        batch.updates(0.1)


@pytest.mark.parametrize("masked", [False, True])
def test_a_lost_worker_ends_requests_side_by_side(masked):
    """masked: no thread runs when it is lost, as all requests wait for masks."""
    engine = engine_of(random_model(small_config(**LONG)), threads=1, processes=2)
    with engine.batch() as batch:
        for first_id in (3, 4):
            batch.join([first_id], masked=masked, **ENDLESS)
        batch.updates(0.2)
        workers(engine)[0].kill()
        with pytest.raises(RuntimeError, match=r"process 1 of 2 .* was killed by SIGKILL"):
            follow(batch, LOST_S)
        with pytest.raises(RuntimeError, match="this engine is closed: process 1 of 2"):
            batch.join([3])
    engine.close()


def test_a_worker_lost_between_requests():
    engine = engine_of(random_model(small_config()), threads=1, processes=3)
    engine.generate([3], max_new_tokens=2)
    os.kill(workers(engine)[1].pid, signal.SIGTERM)
    workers(engine)[0].wait(LOST_S)  # it cannot go on either
    with pytest.raises(RuntimeError, match=r"process 2 of 3 .* SIGTERM"):
        engine.generate([3], max_new_tokens=2)
    engine.close()


def shared_files() -> set[Path]:
    """But for the semaphores of multiprocessing and joblib, which other tests use beside this one, and
    the engine does not.
    """
    return {path for path in Path("/dev/shm").glob("*") if not path.name.startswith(("sem.mp-", "sem.loky-"))}


def test_workers_do_not_outlive_rank_0(tmp_path):
    script = """
        import json, os, signal, sys
        from laneformer.config import LaneformerConfig
        from laneformer.engine import Engine

        config, options = map(json.loads, sys.argv[1:])
        engine = Engine.random(LaneformerConfig(**config), threads=1, processes=2)
        stream = engine.stream([3], **options)
        next(stream)
        print(*(process.pid for process in engine._decoder._workers.processes), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    before = shared_files()
    arguments = [json.dumps(small_config(**LONG).to_dict()), json.dumps(ENDLESS)]
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert ended.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in ended.stdout.split()]
    assert len(pids) == 1
    deadline_s = time.monotonic() + LOST_S
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline_s, "a worker still runs"
        time.sleep(0.01)
    assert shared_files() <= before


def is_alive(pid: int) -> bool:
    """A zombie, which nobody may wait for in a container, is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends between `open` and `read`
        return False


def test_a_worker_lost_while_it_loads(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="ended with exit status 1 while it loaded the model"):
        engine_of(random_model(small_config()), threads=1, processes=2)


def test_a_model_that_cannot_be_loaded():
    model = random_model(small_config(), dtype="bf16")
    model.layers[0].attention.wq.weight.data[0, 0] = np.nan
    with pytest.raises(
        ValueError, match=r"tensor layers\.0\.attention\.wq\.weight holds values that are not finite"
    ):
        engine_of(model, threads=1, processes=2)


def test_threads_of_each_process():
    with pytest.raises(ValueError, match="processes = 5 must be an integer from 1 to 4, the model's lanes"):
        threads_of_each(4, 5, None)
    assert [whole_lanes(3, 2, threads) for threads in (1, 2, 4)] == [True, True, False]
    assert all(whole_lanes(8, 4, threads) for threads in range(1, 40))
    with pytest.raises(ValueError, match="threads = 4 for each of 2 processes would cut one of 3 lanes"):
        threads_of_each(3, 2, 4)
    assert threads_of_each(4, 4, None) >= 1
    with pytest.raises(ValueError, match=r"threads = 0 must be an integer from 1"):
        threads_of_each(4, 4, 0)
