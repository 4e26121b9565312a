"""The CUDA emulator on toy kernels (toys.cu): right ones give the right numbers, each wrong one is found.

What the emulator claims for every order of the threads must be found with every seed; what depends on the
order, with some seed of a few.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.laneformer.cuda import emulator as emulator
from tests.laneformer.cuda.emulator import EmulationError, Report

pytestmark = [pytest.mark.job, pytest.mark.skipif(bool(emulator.MISSING), reason=emulator.MISSING)]
PRIMITIVES = Path(__file__).resolve().parents[3] / "models/laneformer/engine/cuda/primitives.cuh"
TOYS = (Path(__file__).parent / "toys.cu").read_text()
SEEDS = range(20)


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
        self, kernel: str, given: np.ndarray | None = None, *, blocks: int = 1, threads: int = 32, rounds: int = 1,
        depth: int = 1, sides: int = 1, shared_bytes: int = 0, seed: int = 0, watchdog: bool = False,
    ) -> Report:  # fmt: skip
        self.words = np.zeros((2 * depth * 32, 2), np.uint32)
        self.out = np.full(max(8 * 128, 2 * rounds), np.nan, np.float32)
        self.flag = np.zeros(1, np.int32)
        self.given = aligned(np.zeros(32, np.float32)) if given is None else np.ascontiguousarray(given)
        arrays = [array.ctypes.data for array in (self.words, self.given, self.out, self.flag)]
        return emulator.launch(
            self.library, kernel, [Params(*arrays, rounds, depth, side) for side in range(sides)], blocks=blocks,
            threads=threads, shared_bytes=shared_bytes, seed=seed, watchdog=watchdog,
            names={"words": (self.words.ctypes.data, self.words.nbytes)},
        )  # fmt: skip


@pytest.fixture(scope="module")
def toys(cuda_builds: Path) -> Toys:
    return Toys(cuda_builds)


def aligned(values: np.ndarray) -> np.ndarray:
    """A copy that begins at a multiple of 16 bytes."""
    space = np.empty(values.nbytes + 16, np.uint8)
    copy = space[-space.ctypes.data % 16 :][: values.nbytes].view(values.dtype)
    copy[:] = values
    return copy


def test_a_block_sums(toys: Toys) -> None:
    given = np.arange(8 * 128, dtype=np.float32)  # whole numbers: exact in any order
    sums = (given + 99).reshape(8, 128).sum(1).repeat(128)
    for seed in range(3):
        toys("block_sum", given, blocks=8, threads=128, rounds=100, shared_bytes=16, seed=seed)
        np.testing.assert_array_equal(toys.out, sums)


def test_shared_memory_is_not_there_before_the_sync(toys: Toys) -> None:
    given = np.ones(128, np.float32)
    with_nan = 0
    for seed in SEEDS:
        toys("hasty_sum", given, threads=128, shared_bytes=16, seed=seed)
        with_nan += np.isnan(toys.out[:128]).any()
    assert with_nan > len(SEEDS) // 2


@pytest.mark.parametrize(
    ("kernel", "shape"), [("ping_pong", {"blocks": 2}), ("ping_pong_of_grids", {"sides": 2})]
)
def test_words_go_to_and_fro(toys: Toys, kernel: str, shape: dict[str, int]) -> None:
    a, b = 1.0, 2.0
    for _ in range(20):
        a, b = a + 0.5 * b, b + 0.5 * a
    for seed in SEEDS:
        report = toys(kernel, **shape, rounds=20, depth=2, seed=seed)
        assert (report.stores, report.accepted, report.overwritten_unread) == (2 * 20 * 32, 2 * 20 * 32, 0)
        np.testing.assert_allclose(
            toys.out[:64], np.repeat([a, b], 32), rtol=40 * 2**-24
        )  # 20 roundings of half a step


WORDS = {"blocks": 2, "threads": 64, "rounds": 10}
OVERWRITTEN, UNORDERED = "overwritten early", "two stores without an order|the epoch does not grow"
WRONG: list[tuple[str, dict[str, int], str]] = [  # kernel, shape, message: with every seed
    ("ping_pong", {"blocks": 2, "rounds": 20}, r"overwritten early(.|\n)*words\[\d+\]"),
    ("ping_pong_of_grids", {"sides": 2, "rounds": 20}, r"overwritten early(.|\n)*words\[\d+\]"),
    ("acknowledged_early", WORDS, OVERWRITTEN),
    ("acknowledged_early_by_a_warp", WORDS, OVERWRITTEN),
    ("acknowledged_before_reading", {**WORDS, "rounds": 2}, OVERWRITTEN),
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


def test_a_store_that_comes_in_time_only_by_luck_is_found(toys: Toys) -> None:
    by_luck = 0
    for seed in SEEDS:
        with pytest.raises(EmulationError, match="overwritten early") as found:
            toys("overwrites_late", blocks=2, seed=seed)
        by_luck += "nothing makes this store wait for the read of grid 0 block 1 warp 0" in str(found.value)
    assert by_luck > len(SEEDS) // 2


def test_a_thread_speaks_for_another_behind_a_sync(toys: Toys) -> None:
    for seed in SEEDS:
        toys("acknowledged", seed=seed, **WORDS)
        toys("acknowledged_by_a_warp", seed=seed, **WORDS)


def test_a_deadlock_says_who_waits_for_what(toys: Toys) -> None:
    for seed in SEEDS:
        with pytest.raises(EmulationError) as found:
            toys("waits_forever", blocks=2, threads=64, seed=seed)
        for block in range(2):
            place = f"grid 0 block {block} warp"
            assert f"{place} 0 lanes ffffffff poll; lane 0 waits for words[7], which holds epoch 0" in str(
                found.value
            )
            assert f"{place} 1 lanes ffffffff wait at sync_block" in str(found.value)


def test_a_watchdog_ends_what_stands_still(toys: Toys) -> None:
    for seed in SEEDS:
        toys("waits_forever", blocks=2, threads=64, seed=seed, watchdog=True)
        assert toys.flag[0] == 1
        assert np.count_nonzero(toys.out == 1) == 1  # one thread of all was the first


def test_chunks_come_through_a_ring(toys: Toys) -> None:
    given = aligned(np.arange(20 * 128, dtype=np.float32))
    for seed in SEEDS:
        toys("ring", given, rounds=20, depth=3, shared_bytes=128 + 3 * 512, seed=seed)
        np.testing.assert_array_equal(toys.out[:32], given.reshape(-1, 32).sum(0))


@pytest.mark.parametrize("kernel", ["ring_without_wait", "ring_without_sync"])
def test_a_slot_is_spoilt_until_its_bytes_are_there(toys: Toys, kernel: str) -> None:
    """Some seed reads a slot too early and gets NaN, or finds a barrier that is still busy."""
    given = aligned(np.arange(20 * 128, dtype=np.float32))
    found = 0
    for seed in SEEDS:
        try:
            toys(kernel, given, rounds=20, depth=3, shared_bytes=128 + 3 * 512, seed=seed)
        except EmulationError:
            found += 1
        else:
            found += np.isnan(toys.out[:32]).any()
    assert found > len(SEEDS) // 2


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
    near = torch.cat(
        (
            near,
            near.nextafter(torch.tensor(torch.inf)),
            near.nextafter(torch.tensor(-torch.inf)),
            near[:1] * torch.nan,
        )
    )
    given = near[: len(near) // 2 * 2]
    toys(kernel, given.numpy(), rounds=len(given) // 2)
    made = torch.from_numpy(toys.out[: len(given) // 2].copy()).view(dtype)
    np.testing.assert_array_equal(made.float().numpy(), given.to(dtype).float().numpy())


def test_every_primitive_is_offered_as_it_is() -> None:
    def offered(path: Path) -> set[tuple[str, str]]:
        """(name and result, types of the parameters) of each function."""
        found = re.findall(
            r"^(?:DEVICE|SLOW|inline) ([\w: ]+?[*&]? ?\w+)\(([^)]*)\)", path.read_text(), re.MULTILINE
        )
        return {(name, re.sub(r" ?\b\w+(?=,|$)", "", types) if types else "") for name, types in found}

    primitives = offered(PRIMITIVES)
    emulated = (Path(emulator.__file__).with_name(name) for name in ("emulator.h", "warp.h"))
    missing = primitives.difference(*map(offered, emulated))
    assert missing == {
        ("uint32_t shared_address", "const void*"),
        ("uint64_t bits_of_word", "float, uint32_t"),
    }  # PTX alone
    assert len(primitives) > 25


def test_a_compile_error_says_what(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no_such_function"):
        emulator.build("int x = no_such_function();", [], {}, tmp_path)
    assert not list(tmp_path.iterdir())
