"""Tests of requests that end early: cancelled, their engine closed or forked, the interpreter ending."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from laneformer.engine import Cancelled
from tests.laneformer.engine.assets import byte_tokenizer, engine_of, small_model

LONG = {"max_position_embeddings": 20_000, "vocab_size": 264}
ENDLESS = {"max_new_tokens": 19_000, "ignore_eos": True}


def long_engine(**options):
    return engine_of(small_model(**LONG), tokenizer=byte_tokenizer(), **options)


@pytest.fixture
def engine():
    with long_engine() as engine:
        yield engine


def while_it_runs(engine, act) -> threading.Thread:
    """Call `act` from another thread while a request of this one runs."""
    decoder = engine._open()

    def wait_and_act():
        until_s = time.monotonic() + 60
        while not decoder.running and time.monotonic() < until_s:
            time.sleep(0.001)
        time.sleep(0.02)  # into the work
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


CALLS = {
    "generate": lambda e: e.generate([3], **ENDLESS),
    "logprobs": lambda e: e.logprobs([i % 90 for i in range(19_000)]),
    "text": lambda e: e.generate_text("a", **ENDLESS),
    "stream": lambda e: list(e.stream([3], **ENDLESS)),
}


@pytest.mark.parametrize("end", ["cancel", "close"])
@pytest.mark.parametrize("call", CALLS)
def test_unfinished_work_never_looks_finished(engine, call, end):
    while_it_runs(engine, getattr(engine, end))
    with pytest.raises(Cancelled, match="cancelled before it was finished"):
        CALLS[call](engine)
    if end == "cancel":
        assert len(engine.generate([1], max_new_tokens=5)) == 5, "the next request is another one"
        return
    engine.close()
    with pytest.raises(ValueError, match="this engine is closed"):
        engine.generate([1])


def test_a_cancelled_generation_says_so_and_keeps_its_tokens(engine):
    expected = engine.generate([3], max_new_tokens=10)
    while_it_runs(engine, engine.cancel)
    result = engine.generate_detailed([3], **ENDLESS)
    assert result.finish_reason == "cancelled"
    assert 0 < len(result.ids) < 19_000
    # fewer than ten tokens may have come by then
    assert result.ids[:10] == expected[: len(result.ids)]


def test_a_cancel_without_a_request_does_nothing(engine):
    # a cancel that comes too late must not end the next request
    engine.cancel()
    stream = engine.stream([3], max_new_tokens=5)
    tokens = list(stream)
    engine.cancel()
    stream.close()
    assert list(stream) == []
    assert engine.generate([3], max_new_tokens=5) == tokens


@pytest.mark.parametrize(
    "open_stream", [lambda e: e.stream([3], **ENDLESS), lambda e: e.stream_text("a", **ENDLESS)]
)
def test_a_stream_may_be_closed_from_another_thread(engine, open_stream):
    stream = open_stream(engine)
    closer = while_it_runs(engine, stream.close)
    with pytest.raises(Cancelled):
        for _ in stream:
            pass
    closer.join()
    late = open_stream(engine)
    next(late)
    # `run` calls it on this thread: a close between two tokens
    threading.Thread(target=late.close).run()
    with pytest.raises(Cancelled):
        next(late)
    # closed before its first token
    early = open_stream(engine)
    early.close()
    with pytest.raises(Cancelled):
        next(early)
    other = engine.stream([3], max_new_tokens=4)
    next(other)
    late.close()  # long over: it must not end somebody else's request
    assert len(list(other)) == 3


PRELUDE = f"""  # without torch: it takes seconds to import
import os, sys, threading, time
from laneformer import Engine, LaneformerConfig
from laneformer.engine import Cancelled
ENDLESS = {ENDLESS}
config = LaneformerConfig.from_flavor("tiny", max_position_embeddings=20_000)
engine = Engine.random(config)
"""


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program after PRELUDE; a hang raises TimeoutExpired."""
    program = PRELUDE + textwrap.dedent(code)
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_interpreter_ends_while_a_daemon_thread_generates():
    # a thread that comes back from the core into an ending interpreter must not abort the process
    process = run_python("""
        def use():
            while True:
                try: engine.generate([3], **ENDLESS)
                except (Cancelled, RuntimeError): pass
        threading.Thread(target=use, daemon=True).start()
        try:
            while True: engine.generate([4], max_new_tokens=1)
        except RuntimeError as error: assert "busy" in str(error), error
    """)
    assert (process.returncode, "terminate" in process.stderr) == (0, False), process.stderr


def test_the_interpreter_ends_with_an_open_stream():
    process = run_python("""
        streams = [engine.stream([3], **ENDLESS), engine.stream([4])]
        next(streams[0])
    """)
    assert (process.returncode, process.stderr) == (0, "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_is_told_and_does_not_hang():
    # the child has the engine's memory, but none of its threads
    process = run_python("""
        stream = engine.stream([3], **ENDLESS)
        next(stream)
        child = os.fork()
        if child == 0:
            for use in (lambda: engine.generate([1]), lambda: engine.logprobs([1, 2]), lambda: engine.statistics):
                try: use()
                except RuntimeError as error: assert "belongs to process" in str(error), error
                else: sys.exit(3)
            engine.cancel()
            del stream
            engine.close()
            del engine
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0, "the child failed"
        stream.close()
        assert len(engine.generate([3], max_new_tokens=3)) == 3
    """)
    assert (process.returncode, process.stderr) == (0, "")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and RLIMIT_AS")
def test_a_thread_that_cannot_be_created_is_an_error_and_no_hang():
    process = run_python("""
        import resource
        before = len(os.listdir("/proc/self/task"))
        used = 4096 * int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), resource.RLIM_INFINITY))  # 8 MiB for each stack
        try:
            Engine.random(config, threads=400)
        except RuntimeError as error:
            print(error)
        until_s = time.monotonic() + 30
        while len(os.listdir("/proc/self/task")) != before:
            assert time.monotonic() < until_s, "threads are left behind"
        assert len(Engine.random(config, threads=3).generate([3], max_new_tokens=3)) == 3
    """)
    assert process.returncode == 0, process.stderr
    assert "of 400 cannot be created" in process.stdout
    assert "ask for fewer threads" in process.stdout
