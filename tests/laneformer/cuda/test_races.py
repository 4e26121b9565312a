"""No race on shared memory, keys or values in any order of the threads (races.h); planted ones are
found in every run.

These builds see each access of the kernels to plain data and need ten times the processor time,
so shapes are few.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.emulated import EmulatedPasses
from tests.laneformer.cuda.emulator import EmulationError, plain_accesses
from tests.laneformer.cuda.planted import plant_all, put_in_force
from tests.laneformer.cuda.shapes import SHAPES
from tests.laneformer.cuda.test_kernels import text
from tests.proofs import KERNEL_SOURCES

pytestmark = [
    pytest.mark.proof(*KERNEL_SOURCES),
    pytest.mark.job,
    pytest.mark.skipif(bool(emulator.MISSING), reason=emulator.MISSING),
]
BULK_SEEDS = 3, 6, 8  # lane 0 copies for its warp; else each lane copies what it alone reads


@pytest.mark.parametrize(
    ("name", "count"),
    [("delay 0", 7), ("delay 1", 7), ("wide heads", 4), ("at once", 7)],  # rings wrap, but for wide heads'
)
def test_no_race(name: str, count: int, cuda_builds: Path) -> None:
    emulated = SHAPES[name].emulated(cuda_builds, races=True)
    for seed in (0, 3):
        emulated.forget()
        emulated.decode(text(emulated, count), 2, seed)
        reads, writes = plain_accesses(emulated.library)
        assert reads > writes > 10_000


@dataclass(frozen=True)
class Fault:
    """A change of one place, in force while `planted` is its number (planted.py)."""

    file: str
    was: str
    now: str
    found: str


SHARED, BY = (
    "of byte [0-9]+ of shared memory, in no order after",
    "grid 0 block [0-9]+ warp [0-9]+ lane [0-9]+",
)
FAULTS = {
    "a matrix does not wait for its inputs": Fault(
        "block.cuh", "narrow[i] = a, narrow[i + 1] = b; });\n    sync_block();",
        "narrow[i] = a, narrow[i + 1] = b; });\n    if (!HERE) sync_block();",
        f"race: (read|write) {SHARED} (any write|the (read|write) of {BY})",
    ),
    "attention is published before all warps have done theirs": Fault(
        "block.cuh", "sync_block();\n      publish_partial", "if (!HERE) sync_block();\n      publish_partial",
        f"race: (read|write) {SHARED} (any write|the (read|write) of {BY})",
    ),
    "the new key is read where it is being written": Fault(
        "decode.cuh", "if (slot == fresh || !sees(slot)) return;",
        "if ((slot == fresh && !(HERE)) || !sees(slot)) return;",
        f"race: (read|write) of byte [0-9]+ of keys and values 0, in no order after the (read|write) of {BY}",
    ),
    "a chunk is read before it has come": Fault(
        "tape.cuh", "if (at == 0) wait_for",
        "if (at == 0 && !HERE) wait_for", f"race: read {SHARED} a copy that this lane",
    ),
    # the barrier of a warp before it is filled is not alone: products of the whole warp lie between
    "a chunk is filled that has not been read": Fault(
        "tape.cuh", "copy_to(slot);", "copy_to(HERE ? (slot + 1) % kChunks : slot);",
        "a barrier whose last copy nobody has waited for",
    ),
    "results are read before they are written": Fault(
        "columns.cuh", "out[i] = sum;\n  }\n  sync_block();", "out[i] = sum;\n  }\n  if (!HERE) sync_block();",
        f"race: (read|write) {SHARED} (any write|the (read|write) of {BY})",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def planted(cuda_builds: Path) -> EmulatedPasses:
    """The kernels of a shape with all faults in their source, none in force."""
    emulated = SHAPES["late"].emulated(cuda_builds, races=True)
    faults = [(fault.file, fault.was, fault.now) for fault in FAULTS.values()]
    plant_all(emulated, cuda_builds, faults)
    return emulated


@pytest.mark.parametrize("name", [None, *FAULTS])
@pytest.mark.parametrize("seed", BULK_SEEDS)
def test_a_planted_race_is_found(name: str | None, seed: int, planted: EmulatedPasses) -> None:
    put_in_force(planted, 0 if name is None else list(FAULTS).index(name) + 1)
    planted.forget()
    try:
        planted.decode(text(planted, 4), 2, seed)
        message = ""
    except EmulationError as error:
        message = str(error)
    assert bool(message) == (name is not None), message
    assert name is None or re.search(FAULTS[name].found, message), message
