"""Tests of the CUDA emulator on toy kernels (toys.cu): it finds faults of any thread order with every seed."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.emulated import needs_emulator
from tests.laneformer.cuda.emulator import EmulationError, Report

pytestmark = [pytest.mark.job, needs_emulator]
TOYS = (Path(__file__).parent / "toys.cu").read_text()
SEEDS = range(12)


class Params(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("words", "in_", "out", "flag")),
        ("rounds", ctypes.c_int),
    ]


class Toys:
    """The toy kernels of one library, with fresh arrays for every launch."""

    def __init__(self, folder):
        self.library = emulator.build(TOYS, [], {"WEIGHTS_BF16": 0}, folder)

    def __call__(self, kernel, rounds=1, **launch) -> Report:
        self.words, self.flag = np.zeros((64, 2), np.uint32), np.zeros(1, np.int32)
        self.inputs, self.out = np.zeros(64, np.float32), np.full(128, np.nan, np.float32)
        # bulk copies need addresses that 16 divides, which NumPy does not promise
        arrays = self.words, self.inputs[-self.inputs.ctypes.data % 16 // 4 :], self.out, self.flag
        params = Params(*(array.ctypes.data for array in arrays), rounds)
        names = {"words": (self.words.ctypes.data, self.words.nbytes)}
        return emulator.launch(
            self.library, kernel, params, names=names, **{"blocks": 1, "threads": 32, **launch}
        )


@pytest.fixture(scope="module")
def toys(cuda_builds):
    return Toys(cuda_builds)


WORDS = {"blocks": 2, "threads": 64, "rounds": 10}


def test_a_thread_speaks_for_another_behind_a_sync(toys):
    for seed in SEEDS:
        for kernel in ("acknowledged", "acknowledged_by_a_warp"):
            report = toys(kernel, seed=seed, **WORDS)
            assert (report.stores, report.accepted, report.overwritten_unread) == (20, 20, 0)


OVERWRITTEN, UNORDERED = "overwritten early", "two stores without an order|the epoch does not grow"
WRONG = [  # kernel, shape, message: with every seed
    ("acknowledged_early", WORDS, OVERWRITTEN),
    ("acknowledged_early_by_a_warp", WORDS, OVERWRITTEN),
    ("acknowledged_before_reading", {**WORDS, "rounds": 2}, OVERWRITTEN),
    ("overwrites_late", {"blocks": 2}, OVERWRITTEN),  # in time only by luck
    ("two_writers", {"blocks": 2}, UNORDERED),
    ("two_lanes_write", {}, UNORDERED),
    ("diverges", {"shared_bytes": 64}, "diverged: comes to s.* wait at s"),
    (
        "leaves_early",
        {"shared_bytes": 64},
        "lane 5: diverged: ends|diverged: comes to sync_warp, lanes 00000020 have ended",
    ),
    ("writes_outside", {"shared_bytes": 64}, "wrote outside its shared memory, at byte 64 of 64"),
    ("copies_unawaited", {"shared_bytes": 384, "rounds": 1}, "nobody has waited for its"),
    ("copies_unawaited", {"shared_bytes": 384, "rounds": 2}, "a barrier whose last"),
]


@pytest.mark.parametrize(("kernel", "shape", "message"), WRONG)
def test_what_is_wrong_is_found_in_every_order(toys, kernel, shape, message):
    for seed in SEEDS:
        with pytest.raises(EmulationError, match=message):
            toys(kernel, seed=seed, **shape)


def test_a_deadlock_says_who_waits_for_what_and_a_watchdog_ends_it(toys):
    for seed in SEEDS:
        with pytest.raises(EmulationError) as error:
            toys("waits_forever", blocks=2, threads=64, seed=seed)
        for block in range(2):
            place = f"grid 0 block {block} warp"
            waits = f"{place} 0 lanes ffffffff poll; lane 0 waits for words[7], which holds epoch 0"
            assert waits in str(error.value)
            assert f"{place} 1 lanes ffffffff wait at sync_block" in str(error.value)
        toys("waits_forever", blocks=2, threads=64, seed=seed, watchdog=True)
        assert toys.flag[0] == 1
        assert np.count_nonzero(toys.out == 1) == 1  # one thread of all was the first
