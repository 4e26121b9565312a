"""Tests that a signal sets a flag while the main thread is busy, and of the deadline."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys, threading, time
from train.supervise.signals import WORKER
WORKER.deadline_s = float(sys.argv[1])
WORKER.install()
print("ready", flush=True)
if sys.argv[2] == "hang":
    threading.Event().wait()
while not WORKER.request:
    time.sleep(0.01)
print(WORKER.request, flush=True)
time.sleep(0.1)  # a second signal soon after is the same request
print("saved", flush=True)
"""


@contextmanager
def start_process(*arguments: str) -> Iterator[subprocess.Popen]:
    # when it is ready for signals
    command = [sys.executable, "-c", PROGRAM, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=-1, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_two_signals_at_once_are_one_request(number):
    with start_process("60", "poll") as process:
        process.send_signal(number)
        assert process.stdout.readline() == f"{number.name}\n"
        process.send_signal(number)
        assert process.stdout.read() == "saved\n"
    assert process.returncode == 0


def test_the_deadline_ends_what_hangs():
    with start_process("0.2", "hang") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 1
