"""Faults planted in the kernels of passes, each found; races on plain data among them (races.h)."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

from laneformer.engine.cuda import geometry
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.emulator import EmulationError, plain_accesses
from tests.laneformer.cuda.planted import Patch, plant_all, put_in_force
from tests.laneformer.cuda.stand_ins import EmulatedPasses
from tests.laneformer.cuda.test_passes import one_by_one, text
from tests.proofs import KERNEL_SOURCES

pytestmark = [
    pytest.mark.proof(*KERNEL_SOURCES),
    pytest.mark.slow,
    pytest.mark.skipif(bool(emulator.MISSING), reason=emulator.MISSING),
]
FAULTS = {  # file, was, now (planted.py); "numbers" where the emulator has nothing to say
    "a column reads another one's mail": (
        "block.cuh", "own_inbox() const { return inbox(p.device); }",
        "own_inbox() const { return p.inbox[p.device] + (HERE ? column / 2 * 2 : column) * int64_t{kInboxWords}; }",
    ),
    "keys go to the column's number, not its sequence's": (
        "block.cuh", "return sequence * kDeviceLanes", "return (HERE ? column : sequence) * kDeviceLanes",
    ),
    "a scale is another column's": ("passes.cu", "publish(scales[column])", "publish(scales[HERE ? 0 : column])"),
    "columns share their rows of the stream": (
        "passes.cu", "rows = streams + c * kMostStreamRows", "rows = streams + (HERE ? 0 : c) * kMostStreamRows",
    ),
    "columns share the words of a lane": (
        "passes.cu", "kMmaColumns + c) * kLaneWords", "kMmaColumns + (HERE ? 0 : c)) * kLaneWords",
    ),
    "the last part of a sum is left out": (
        "columns.cuh", "part < kParts[Op]; ++part) sum +=", "part < kParts[Op] - (HERE); ++part) sum +=",
    ),
}  # fmt: skip
RACES = {
    "a column's sum of squares is where the last one's is read": (
        "passes.cu", "= scale;\n    sync_block();", "= scale;\n    if (!HERE) sync_block();",
    ),
    "parts are added before they are there": (
        "columns.cuh", "  }\n  sync_block();\n  for (int i", "  }\n  if (!HERE) sync_block();\n  for (int i",
    ),
    "sums are read before they are added": (
        "columns.cuh", "out[i] = sum;\n  }\n  sync_block();", "out[i] = sum;\n  }\n  if (!HERE) sync_block();",
    ),
}  # fmt: skip


def planted(faults: dict[str, Patch], builds: Path, races: bool = False) -> EmulatedPasses:
    """Passes with all these faults in their source, none in force."""
    passes = EmulatedPasses(builds, 4, races=races)
    plant_all(passes, "passes", builds, faults.values())
    return passes


def outcome(passes: EmulatedPasses, number: int, seed: int) -> tuple[str, torch.Tensor | None]:
    """What the emulator says of three passes of two sequences, and the first one's logits."""
    put_in_force(passes, number)
    passes.forget()
    passes.seed, rows, ids, other = seed, list[torch.Tensor](), text(6), text(6, 2)
    try:
        for i in range(0, 6, 2):
            columns = [(other[i], i, 3), (ids[i], i, 1), (ids[i + 1], i + 1, 1), (other[i + 1], i + 1, 3)]
            rows.append(passes.logits(columns)[1:3])
    except EmulationError as error:
        return str(error), None
    return "", torch.cat(rows)


def test_every_fault_is_found(cuda_builds: Path) -> None:
    right, faulty = one_by_one(EmulatedPasses(cuda_builds, 1), text(6)), planted(FAULTS, cuda_builds)
    for number, name in enumerate([None, *FAULTS]):
        said, logits = outcome(faulty, number, seed=1)
        found = bool(said) or logits is None or not torch.equal(logits, right)
        assert found == bool(number), f"{name}: {said}"


def test_every_planted_race_is_found(cuda_builds: Path) -> None:
    racing = planted(RACES, cuda_builds, races=True)
    for number, seed in itertools.product(range(len(RACES) + 1), (3, 6)):
        said, _ = outcome(racing, number, seed)
        assert bool(re.search("race: [a-z]+ of byte [0-9]+ of shared memory, in no order", said)) == bool(
            number
        ), said
        reads, writes = plain_accesses(racing.library)
        assert number or reads > writes > 10_000


@pytest.mark.parametrize("spare", [8, 6])
def test_what_wrong_drafts_leave_in_a_ring_is_outside_the_window(
    spare: int, cuda_builds: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven wrong drafts a pass, and a ring without a position to spare: with one less than they
    need, it is seen.
    """
    monkeypatch.setattr(geometry, "MAX_COLUMNS", spare)
    shape = {"blocks_per_lane": 2}
    eight, ids = EmulatedPasses(cuda_builds, 8, **shape), text(12)
    assert eight.geometry.splits == 1
    rows = []
    for i, token in enumerate(ids):
        rows.append(eight.logits([(token, i, 0), *((95 - token, i + n, 0) for n in range(1, 8))])[:1])
    right = one_by_one(EmulatedPasses(cuda_builds, 1, **shape), ids)
    assert torch.equal(torch.cat(rows), right) == (spare == 8)
