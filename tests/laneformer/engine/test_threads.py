"""Groups of threads share a lane each, or some lanes, and no bit of any result may change.

The threads far outnumber the cores here, so every wait also meets a peer that is not running.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from laneformer.engine.cpu.decoder import MAX_THREADS
from laneformer.engine.machine import this_machine
from tests.laneformer.engine.assets import (
    TORCH_DTYPES,
    engine_of,
    random_ids,
    random_model,
    small_config,
    usable_isas,
)

EIGHT_LANES = {
    "hidden_size": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_lanes": 8,
    "vocab_size": 104,
}
TWO_KV_HEADS_A_LANE = {"num_lanes": 2}
SHAPES = {
    "four_lanes": {},
    "eight_lanes": EIGHT_LANES,
    # wide enough that every thread of a group owns tiles of every matrix
    "many_tiles": {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 640},
    "two_kv_heads_a_lane": TWO_KV_HEADS_A_LANE,
    "replicate_head": {"lm_head_type": "replicate"},
    "lane_head": {"lm_head_type": "lane"},
    "no_comm": {"use_attention_comm": False, "use_mlp_comm": False},
}


@pytest.mark.parametrize("overrides", SHAPES.values(), ids=SHAPES.keys())
def test_sharing_lanes_changes_no_bit(overrides):
    model = random_model(small_config(**overrides), seed=1, dtype="bf16")
    ids = random_ids(model.config, 40)
    logits, tokens = {}, {}
    for threads in (1, 3, 5, 6, 8, 9, 16):
        with engine_of(model, threads=threads) as engine:
            assert engine.threads == threads
            logits[threads] = engine.logits(ids)
            tokens[threads] = engine.generate(ids[:5], max_new_tokens=20, temperature=1.0, seed=7)
    for threads in (3, 5, 6, 8, 9, 16):
        np.testing.assert_array_equal(logits[threads], logits[1], err_msg=f"{threads} threads")
        assert tokens[threads] == tokens[1], f"{threads} threads"


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("isa", usable_isas())
def test_every_instruction_set_and_dtype_shares_lanes(isa, dtype):
    model = random_model(small_config(), seed=2, dtype=dtype)
    ids = random_ids(model.config, 35)
    with engine_of(model, threads=1, isa=isa) as one, engine_of(model, threads=9, isa=isa) as nine:
        np.testing.assert_array_equal(nine.logits(ids), one.logits(ids))


@pytest.mark.parametrize("isa", usable_isas())
def test_rounded_activations_share_lanes(isa):
    model = random_model(small_config(), seed=3, dtype="bf16")
    ids = random_ids(model.config, 35)
    with (
        engine_of(model, threads=1, isa=isa, math="bf16") as one,
        engine_of(model, threads=6, isa=isa, math="bf16") as six,
    ):
        np.testing.assert_array_equal(six.logits(ids), one.logits(ids))


def test_a_hundred_repeats_are_equal():
    model = random_model(small_config(), seed=4)
    ids = random_ids(model.config, 20)
    with engine_of(model, threads=2) as two, engine_of(model, threads=5) as five:
        first = two.logits(ids)
        for _ in range(50):
            np.testing.assert_array_equal(two.logits(ids), first)
            np.testing.assert_array_equal(five.logits(ids), first)


def test_too_many_threads_are_refused():
    with pytest.raises(
        ValueError, match=f"threads = {MAX_THREADS + 1} must be an integer from 1 to {MAX_THREADS}"
    ):
        engine_of(random_model(small_config()), threads=MAX_THREADS + 1)


@pytest.mark.parametrize("head", ["vocab_parallel", "replicate", "lane"])
def test_a_head_of_many_shares_goes_to_whoever_is_free(head):
    """Hundreds of shares on more threads than cores: which thread takes which differs from run to run."""
    config = small_config(vocab_size=16384, lm_head_type=head)
    model = random_model(config, seed=5, dtype="bf16")
    ids = random_ids(config, 9)
    with engine_of(model, threads=1) as one:
        expected = one.logits(ids)
    for threads in (2, 3, 7):
        with engine_of(model, threads=threads) as engine:
            for _ in range(3):
                np.testing.assert_array_equal(engine.logits(ids), expected, err_msg=f"{threads} threads")


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no CPU affinity")
def test_pinned_threads_stay_on_one_allowed_cpu_each():
    model = random_model(small_config(), seed=6)
    before = {task.name for task in Path("/proc/self/task").iterdir()}
    cpus = sorted(os.sched_getaffinity(0))
    assert sorted(this_machine().one_cpu_a_core_first()) == cpus
    with engine_of(model, threads=2, pin=True) as pinned, engine_of(model, threads=2) as free:
        ids = random_ids(model.config, 9)
        np.testing.assert_array_equal(pinned.logits(ids), free.logits(ids))
        threads = [int(t.name) for t in Path("/proc/self/task").iterdir() if t.name not in before]
        places = [sorted(os.sched_getaffinity(thread)) for thread in threads]
        assert (
            sorted(p for p in places if p != cpus or len(cpus) == 1)[:2] == sorted([cpu] for cpu in cpus)[:2]
        )
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="LD_PRELOAD")
@pytest.mark.skipif(
    this_machine().processors < 2, reason="with fewer processors than threads they always yield"
)
def test_yields_that_cost_a_time_slice_are_rare(tmp_path):
    """As from Linux 6.18 on beside any other program. Ten a second and thread, and a few before the request."""
    (tmp_path / "slow.c").write_text(SLOW_YIELD)
    slow = tmp_path / "slow.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", slow, tmp_path / "slow.c"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(slow)}
    done = subprocess.run([sys.executable, "-c", DECODE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    yields = int(done.stderr.rpartition("yields ")[2])
    assert yields <= 2 * (10 * float(done.stdout) + 10)
