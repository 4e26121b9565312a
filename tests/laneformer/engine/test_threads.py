"""Tests of threads: their number, their placement, and how they wait."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from laneformer.engine.machine import this_machine
from tests.laneformer.engine.assets import engine_of, small_model


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no CPU affinity")
def test_pinned_threads_stay_on_one_allowed_cpu_each():
    model = small_model(seed=6)
    before = {task.name for task in Path("/proc/self/task").iterdir()}
    cpus = sorted(os.sched_getaffinity(0))
    assert sorted(this_machine().one_cpu_a_core_first()) == cpus
    with engine_of(model, threads=2, pin=True) as pinned:
        pinned.logits([1, 2, 3])
        threads = [int(t.name) for t in Path("/proc/self/task").iterdir() if t.name not in before]
        places = [sorted(os.sched_getaffinity(thread)) for thread in threads]
        # threads that other libraries start meanwhile run anywhere
        on_one = sorted(p for p in places if p != cpus or len(cpus) == 1)
        assert on_one[:2] == sorted([cpu] for cpu in cpus)[:2]
    assert os.sched_getaffinity(0) == set(cpus)


SLOW_YIELD = """
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
static int count;
int sched_yield(void) { __sync_fetch_and_add(&count, 1); return usleep(3000); }
__attribute__((destructor)) static void tell(void) { fprintf(stderr, "yields %d\\n", count); }
"""
DECODE = """
import time
from laneformer import Engine, LaneformerConfig
engine = Engine.random(LaneformerConfig.from_flavor("tiny"), threads=2)
began = time.monotonic()
engine.generate([1, 2, 3], max_new_tokens=100, ignore_eos=True)
print(time.monotonic() - began)
"""


@pytest.mark.rotate  # by the clock
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="LD_PRELOAD")
@pytest.mark.skipif(
    this_machine().processors < 2, reason="with more threads than cores they always yield"
)
def test_yields_that_cost_a_time_slice_are_rare(tmp_path):
    # from Linux 6.18 on, beside any other program; ten a second per thread, and a few before
    (tmp_path / "slow.c").write_text(SLOW_YIELD)
    slow = tmp_path / "slow.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", slow, tmp_path / "slow.c"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(slow)}
    program = [sys.executable, "-c", DECODE]
    process = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    yields = int(process.stderr.rpartition("yields ")[2])
    assert yields <= 2 * (10 * float(process.stdout) + 10)
