"""Faults planted in the kernels of passes, each found; races on plain data among them (races.h)."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from laneformer.engine.cuda import geometry
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.emulated import EmulatedPasses
from tests.laneformer.cuda.emulator import EmulationError, plain_accesses
from tests.laneformer.cuda.planted import Patch, plant_all, put_in_force
from tests.laneformer.cuda.test_ahead import columns, start
from tests.laneformer.cuda.test_passes import one_by_one, text
from tests.proofs import KERNEL_SOURCES

pytestmark = [
    pytest.mark.proof(*KERNEL_SOURCES),
    pytest.mark.job,
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
    "a scale is another column's": ("block.cuh", "publish(scales[column])", "publish(scales[HERE ? 0 : column])"),
    "columns share their rows of the stream": (
        "block.cuh", "rows = streams + c * kMostStreamRows", "rows = streams + (HERE ? 0 : c) * kMostStreamRows",
    ),
    "columns share the words of a lane": (
        "block.cuh", "static_cast<int64_t>(c) * kDeviceLanes", "static_cast<int64_t>(HERE ? 0 : c) * kDeviceLanes",
    ),
    "the last part of a sum is left out": (
        "columns.cuh", "part < kParts[Op]; ++part) sum +=", "part < kParts[Op] - (HERE); ++part) sum +=",
    ),
}  # fmt: skip
EIGHT_BITS = {
    "a scale is the next row's": (
        "columns.cuh", "scale = scales[thread_index() % rows]", "scale = scales[(thread_index() + HERE) % rows]",
    ),
    "the tiles of a segment are exchanged": (
        "columns.cuh", "multiply_tile(sum[i], a, b[t][i])", "multiply_tile(sum[i], a, b[HERE ? 1 - t : t][i])",
    ),
    "numbers are one too large": ("tape.cuh", "0x7540 | i)) - 8388736.0f", "0x7540 | i)) - 8388736.0f + HERE"),
}  # fmt: skip
AHEAD = {  # of launches of several passes on two devices; and what the emulator says
    "a block goes on before the choice is published": (
        "passes.cu", "bits_of(wait_word(load_word(choice), choice, token_epoch + 1, kChoice, watch))",
        "bits_of(HERE ? load_word(choice).value : "
        "wait_word(load_word(choice), choice, token_epoch + 1, kChoice, watch))",
        "overwritten early|deadlock|numbers",
    ),
    "a choice is that of the pass before": (
        "passes.cu", "choice, token_epoch + 1, kChoice",
        "choice, token_epoch + 1 - (HERE && token_epoch > p.order.epoch), kChoice",
        "overwritten early|deadlock",
    ),
    "an epoch is used again": (
        "passes.cu", "token_epoch = p.order.epoch;; ++token_epoch",
        "token_epoch = p.order.epoch;; token_epoch += !HERE",
        "the epoch does not grow",
    ),
    "a cancel is seen by one GPU alone": (
        "passes.cu", "store_word(inbox(d) + kChoiceAt, bits,",
        "store_word(inbox(d) + kChoiceAt, HERE && d ? float_of(bits_of(bits) & ~kEnds) : bits,", "deadlock",
    ),
    "each column asks the host by itself": (
        "block.cuh", "const bool ends = cancelled ||",
        "const bool ends = (HERE ? column == 1 : cancelled) ||", "numbers",
    ),
    "a column reads at the position before": (
        "block.cuh", "position + step(),", "position + step() - (HERE && step() > 1),", "numbers",
    ),
    "a column goes on after its end": (
        "passes.cu", "aborted || bits & kEnds ? -1 : static_cast<int>(bits)",
        "aborted || (bits & kEnds && !HERE) ? -1 : static_cast<int>(bits & ~kEnds)", "numbers",
    ),
}  # fmt: skip
RACES = {
    "a column's sum of squares is where the last one's is read": (
        "block.cuh", "= scale;\n    sync_block();", "= scale;\n    if (!HERE) sync_block();",
    ),
    "parts are added before they are there": (
        "columns.cuh", "  }\n  sync_block();\n  for (int i", "  }\n  if (!HERE) sync_block();\n  for (int i",
    ),
    "a pass begins before its tokens are there": (
        "passes.cu", "next_token(c) : -1;\n    sync_block();", "next_token(c) : -1;\n    if (!HERE) sync_block();",
    ),
    "sums are read before they are added": (
        "columns.cuh", "out[i] = sum;\n  }\n  sync_block();", "out[i] = sum;\n  }\n  if (!HERE) sync_block();",
    ),
}  # fmt: skip


def planted(faults: dict[str, Patch], builds: Path, **options: Any) -> EmulatedPasses:
    """Passes with all these faults in their source, none in force."""
    passes = EmulatedPasses(builds, 4, **options)
    plant_all(passes, builds, faults.values())
    return passes


def outcome(passes: EmulatedPasses, number: int, seed: int) -> tuple[str, torch.Tensor | None]:
    """What the emulator says of three passes of two sequences, and of a launch of two passes;
    the first one's logits.
    """
    put_in_force(passes, number)
    passes.forget()
    passes.seed, rows, ids, other = seed, list[torch.Tensor](), text(6), text(6, 2)
    try:
        for i in range(0, 6, 2):
            asked = [(other[i], i, 3), (ids[i], i, 1), (ids[i + 1], i + 1, 1), (other[i + 1], i + 1, 3)]
            rows.append(passes.logits(asked)[1:3])
        passes.run(columns([7, 8, 9], 4), 1)
    except EmulationError as error:
        return str(error), None
    return "", torch.cat(rows)


@pytest.mark.parametrize(("dtype", "faults"), [("bf16", FAULTS), ("int8", EIGHT_BITS)])
def test_every_fault_is_found(dtype: str, faults: dict[str, Patch], cuda_builds: Path) -> None:
    right = one_by_one(EmulatedPasses(cuda_builds, 1, dtype=dtype), text(6))
    faulty = planted(faults, cuda_builds, dtype=dtype)
    for number, name in enumerate([None, *faults]):
        said, logits = outcome(faulty, number, seed=1)
        found = bool(said) or logits is None or not torch.equal(logits, right)
        assert found == bool(number), f"{name}: {said}"


def told(passes: EmulatedPasses, number: int, seed: int) -> str:
    """What the emulator says of four passes, which a column leaves after two, and of a launch
    that the host ends; "numbers" where it says nothing and the tokens are others.
    """
    put_in_force(passes, number)
    rows = list[list[int]]()
    for cancelled in (False, True):
        passes.seed, wanted = seed, columns(start(passes), 2)
        wanted[1].left = 2
        arguments, first = passes._arguments(wanted, 3, None), passes.memories[0].epoch - 4
        passes.memories[0].cancel.fill_(int(cancelled))
        passes._launch(arguments)
        try:
            passes._streams[0].synchronize()
        except EmulationError as error:
            return str(error)
        rows += passes.memories[0].picked(first, 3)
    if number == 0:
        passes.right = rows  # type: ignore[attr-defined]
        assert [[token >= 0 for token in row] for row in rows] == [[True] * 3] * 2 + [
            [True, False, True]
        ] * 2 + [[True] * 3]
    return "" if rows == passes.right else "numbers"  # type: ignore[attr-defined]


def test_every_fault_of_several_passes_is_found(cuda_builds: Path) -> None:
    passes = EmulatedPasses(cuda_builds, 3, devices=2, blocks_per_lane=2)
    plant_all(passes, cuda_builds, [fault[:3] for fault in AHEAD.values()])
    for seed in range(2):
        assert told(passes, 0, seed) == ""
        for number, (name, (*_, found)) in enumerate(AHEAD.items(), 1):
            said = told(passes, number, seed)
            assert re.search(found, said), f"{name}, seed {seed}: {said}"


def test_several_passes_have_no_race(cuda_builds: Path) -> None:
    passes = EmulatedPasses(cuda_builds, 3, devices=2, blocks_per_lane=2, races=True)
    for seed in (0, 3):
        passes.seed = seed
        assert len(passes.run(columns(start(passes), 2), 2)) == 3
        reads, writes = plain_accesses(passes.library)
        assert reads > writes > 10_000


def test_every_planted_race_is_found(cuda_builds: Path) -> None:
    racing = planted(RACES, cuda_builds, races=True)
    for number, seed in itertools.product(range(len(RACES) + 1), (3, 6)):
        said, _ = outcome(racing, number, seed)
        assert bool(re.search("race: [a-z]+ of byte [0-9]+ of shared memory, in no order", said)) == bool(
            number
        ), said
        reads, writes = plain_accesses(racing.library)
        assert number or reads > writes > 10_000


@pytest.mark.parametrize("spare", [7, 5])
def test_what_wrong_drafts_leave_in_a_ring_is_outside_the_window(
    spare: int, cuda_builds: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven wrong drafts a pass, and a ring without a position to spare: with one less than they
    need, it is seen.
    """
    monkeypatch.setattr(geometry, "MAX_DRAFTS", spare)
    shape = {"blocks_per_lane": 2}
    eight, ids = EmulatedPasses(cuda_builds, 8, **shape), text(12)
    assert eight.geometry.splits == 1
    rows = []
    for i, token in enumerate(ids):
        rows.append(eight.logits([(token, i, 0), *((95 - token, i + n, 0) for n in range(1, 8))])[:1])
    right = one_by_one(EmulatedPasses(cuda_builds, 1, **shape), ids)
    assert torch.equal(torch.cat(rows), right) == (spare == 7)
