"""The CUDA emulator on toy kernels (toys.cu): right ones give the right numbers, each wrong one is found.

What the emulator claims for every order of the threads must be found with every seed; what depends on the
order, with some seed of a few.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.emulated import needs_emulator
from tests.laneformer.cuda.emulator import EmulationError, Report

pytestmark = [pytest.mark.job, needs_emulator]
TOYS = (Path(__file__).parent / "toys.cu").read_text()
SEEDS = range(12)


class Params(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("words", "in_", "out", "flag")),
        *((name, ctypes.c_int) for name in ("rounds", "depth", "side")),
    ]


class Toys:
    """The toy kernels of one library over arrays that every launch finds fresh."""

    def __init__(self, folder: Path) -> None:
        self.library = emulator.build(TOYS, [], {"WEIGHTS_BF16": 0}, folder)

    def __call__(
        self, kernel: str, given: np.ndarray | None = None, *, rounds: int = 1, depth: int = 1, sides: int = 1,
        **launch: Any,
    ) -> Report:  # fmt: skip
        self.words = np.zeros((2 * depth * 32, 2), np.uint32)
        self.out = np.full(max(8 * 128, 2 * rounds), np.nan, np.float32)
        self.flag = np.zeros(1, np.int32)
        self.given = aligned(np.zeros(32, np.float32)) if given is None else np.ascontiguousarray(given)
        arrays = [array.ctypes.data for array in (self.words, self.given, self.out, self.flag)]
        params = [Params(*arrays, rounds, depth, side) for side in range(sides)]
        names = {"words": (self.words.ctypes.data, self.words.nbytes)}
        return emulator.launch(
            self.library, kernel, params, names=names, **{"blocks": 1, "threads": 32, **launch}
        )


@pytest.fixture(scope="module")
def toys(cuda_builds: Path) -> Toys:
    return Toys(cuda_builds)


def aligned(values: np.ndarray) -> np.ndarray:
    """A copy that begins at a multiple of 16 bytes."""
    space = np.empty(values.nbytes + 16, np.uint8)
    copy = space[-space.ctypes.data % 16 :][: values.nbytes].view(values.dtype)
    copy[:] = values
    return copy


WORDS = {"blocks": 2, "threads": 64, "rounds": 10}
NUMBERS = np.arange(8 * 128, dtype=np.float32)  # whole numbers: exact in any order
CHUNKS = aligned(np.arange(20 * 128, dtype=np.float32))
RING: dict[str, int] = {"rounds": 20, "depth": 3, "shared_bytes": 128 + 3 * 512}


def test_right_kernels_give_the_right_numbers(toys: Toys) -> None:
    """And a thread speaks for another behind a sync."""
    a, b = 1.0, 2.0
    for _ in range(20):
        a, b = a + 0.5 * b, b + 0.5 * a
    for seed in SEEDS:
        toys("block_sum", NUMBERS, blocks=8, threads=128, rounds=100, shared_bytes=16, seed=seed)
        np.testing.assert_array_equal(toys.out, (NUMBERS + 99).reshape(8, 128).sum(1).repeat(128))
        for kernel, shape in (("ping_pong", {"blocks": 2}), ("ping_pong_of_grids", {"sides": 2})):
            report = toys(kernel, **shape, rounds=20, depth=2, seed=seed)
            assert (report.stores, report.accepted, report.overwritten_unread) == (1280, 1280, 0)
            right = np.repeat([a, b], 32)
            np.testing.assert_allclose(toys.out[:64], right, rtol=40 * 2**-24)  # 20 roundings of half a step
        toys("ring", CHUNKS, seed=seed, **RING)
        np.testing.assert_array_equal(toys.out[:32], CHUNKS.reshape(-1, 32).sum(0))
        toys("acknowledged", seed=seed, **WORDS)
        toys("acknowledged_by_a_warp", seed=seed, **WORDS)


OVERWRITTEN, UNORDERED = "overwritten early", "two stores without an order|the epoch does not grow"
WRONG: list[tuple[str, dict[str, int], str]] = [  # kernel, shape, message: with every seed
    ("ping_pong", {"blocks": 2, "rounds": 20}, r"overwritten early(.|\n)*words\[\d+\]"),
    ("ping_pong_of_grids", {"sides": 2, "rounds": 20}, r"overwritten early(.|\n)*words\[\d+\]"),
    ("acknowledged_early", WORDS, OVERWRITTEN),
    ("acknowledged_early_by_a_warp", WORDS, OVERWRITTEN),
    ("acknowledged_before_reading", {**WORDS, "rounds": 2}, OVERWRITTEN),
    ("overwrites_late", {"blocks": 2}, OVERWRITTEN),  # in time only by luck
    ("two_writers", {"blocks": 2}, UNORDERED),
    ("two_lanes_write", {}, UNORDERED),
    ("diverges", {"shared_bytes": 64}, "diverged: comes to s.* wait at s"),
    ("leaves_early", {"shared_bytes": 64},
     "lane 5: diverged: ends|diverged: comes to sync_warp, lanes 00000020 have ended"),
    ("writes_outside", {"shared_bytes": 64}, "wrote outside its shared memory, at byte 64 of 64"),
    ("copies_unawaited", {"shared_bytes": 384, "rounds": 1}, "nobody has waited for its"),
    ("copies_unawaited", {"shared_bytes": 384, "rounds": 2}, "a barrier whose last"),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "shape", "message"), WRONG)
def test_what_is_wrong_is_found_in_every_order(
    toys: Toys, kernel: str, shape: dict[str, int], message: str
) -> None:
    for seed in SEEDS:
        with pytest.raises(EmulationError, match=message):
            toys(kernel, seed=seed, **shape)


@pytest.mark.parametrize(
    ("kernel", "shape"),
    [
        ("hasty_sum", {"threads": 128, "shared_bytes": 16}),
        ("ring_without_wait", RING),
        ("ring_without_sync", RING),
    ],
)
def test_what_is_read_too_early_is_no_number(toys: Toys, kernel: str, shape: dict[str, int]) -> None:
    """Shared memory before its sync, a slot before its bytes have come: in some order, NaN or a busy barrier."""
    too_early = 0
    for seed in SEEDS:
        try:
            toys(kernel, CHUNKS, seed=seed, **shape)
            too_early += np.isnan(toys.out[:32]).any()
        except EmulationError:
            too_early += 1
    assert too_early > len(SEEDS) // 2


def test_a_deadlock_says_who_waits_for_what_and_a_watchdog_ends_it(toys: Toys) -> None:
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


@pytest.mark.parametrize(("kernel", "dtype"), [("halves", torch.float16), ("bf16_halves", torch.bfloat16)])
def test_16_bit_numbers(toys: Toys, kernel: str, dtype: torch.dtype) -> None:
    """Every number of 16 bits, every tie between two, and their neighbours in fp32."""
    codes = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    values = codes.view(dtype).float()
    if kernel == "halves":
        toys("floats", codes.numpy().view(np.float32), rounds=32768)
        np.testing.assert_array_equal(toys.out, values.numpy())
    numbers = values[~values.isnan()].sort().values
    near = torch.cat((numbers, numbers[1:] / 2 + numbers[:-1] / 2))
    beside = [near.nextafter(torch.tensor(sign * torch.inf)) for sign in (1, -1)]
    given = torch.cat((near, *beside, near[:1] * torch.nan))
    given = given[: len(given) // 2 * 2]
    toys(kernel, given.numpy(), rounds=len(given) // 2)
    packed = torch.from_numpy(toys.out[: len(given) // 2].copy()).view(dtype)
    np.testing.assert_array_equal(packed.float().numpy(), given.to(dtype).float().numpy())
