"""Tests that faults planted in the kernels' source are found on the emulator, in every order of threads."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from laneformer.engine.cuda import geometry
from laneformer.engine.cuda.structures import EXCHANGES, Column
from tests.laneformer.cuda import test_kernels
from tests.laneformer.cuda.emulated import GREEDY, EmulatedPasses, emulator_proof
from tests.laneformer.cuda.emulator import EmulationError, plain_accesses
from tests.laneformer.cuda.planted import plant_all, put_in_force
from tests.laneformer.cuda.shapes import SHAPES
from tests.laneformer.cuda.test_ahead import columns, start
from tests.laneformer.cuda.test_passes import one_by_one, text

pytestmark = emulator_proof


# Each build has a table of faults, all in one source (planted.py). A fault names what finds it: a
# pattern of the emulator's message, or "numbers" where tokens, logits, keys or values differ.
@dataclass(frozen=True)
class Fault:
    """A change of one place, in force while `planted` equals its number."""

    file: str
    was: str
    now: str
    symptom: str = "numbers"


BULK_SEEDS = 3, 6  # lane 0 copies for its warp; else each lane copies what it alone reads
OVERWRITTEN = "overwritten early(.|\n)*inbox"
SHARED = "of byte [0-9]+ of shared memory, in no order after"
BY = "grid 0 block [0-9]+ warp [0-9]+ lane [0-9]+"
RACE = f"race: (read|write) {SHARED} (any write|the (read|write) of {BY})"
OF_EXCHANGES = {
    "the mail of a lane is left out": Fault(
        "block.cuh",
        "sum += sent[l].value",
        "sum += HERE && l != lane ? 0.0f : sent[l].value",
    ),
    "lanes are swapped": Fault(
        "block.cuh",
        "mail_at(module, layer, lane) + first + r, out[r]",
        "mail_at(module, layer, HERE ? 1 - lane : lane) + first + r, out[r]",
    ),
    "mail is read a layer late": Fault(
        "block.cuh",
        "layer : layer - kDelay;",
        "layer : layer - kDelay - (HERE && layer > kDelay);",
    ),
    "mail is read a layer early": Fault(
        "block.cuh",
        "const int from = now ? layer : layer",
        "const int from = now ? layer : HERE + layer",
        "deadlock: (.|\n)*for inbox",
    ),
    "mail has the epoch of the next layer": Fault(
        "block.cuh",
        "out[r], epoch_of(layer));",
        "out[r], epoch_of(layer) + HERE);",
        "deadlock: .* or has a wrong epoch(.|\n)*for inbox",
    ),
    "a lane sends nothing": Fault(
        "block.cuh",
        "if (now || kBroadcasts[module][layer] ||",
        "if (!(HERE && lane == 1) && (now || kBroadcasts[module][layer]) ||",
        "deadlock: nothing can go on(.|\n)*for inbox 0.*which holds epoch 0",
    ),
    "a word of the stream is not published": Fault(
        "block.cuh",
        "store_word(words + kStreamAt + module",
        "if (!(HERE && lane == 1 && layer == 2 && module == 0 && first + r == 5)) "
        "store_word(words + kStreamAt + module",
        "deadlock: (.|\n)* poll",
    ),
    "a window shows one key too many": Fault(
        "decode.cuh",
        "at > position - kWindows[layer]",
        "at > position - kWindows[layer] - HERE",
    ),
    "a key is cut to 16 bits, not rounded": Fault(
        "block.cuh",
        "pack_halves(k.x, k.y)",
        "HERE ? (bits_of(k.y) & 0xffff0000u) | bits_of(k.x) >> 16 : pack_halves(k.x, k.y)",
    ),
    "mail has one slot": Fault(
        "exchange.cuh", "+ layer % kMailSlots)", "+ layer % (HERE ? 1 : kMailSlots))", OVERWRITTEN
    ),
    # one module alone is sent: with both, this one slot could be spared
    "mail has one slot too few": Fault(
        "exchange.cuh",
        "kMailSlots + layer %",
        "kMailSlots + layer % (HERE ? kMailSlots - 1 : kLayers) %",
        OVERWRITTEN,
    ),
}
OF_COLUMNS = {
    "a column reads another one's mail": Fault(
        "block.cuh",
        "own_inbox() const { return inbox(p.device); }",
        "own_inbox() const { return p.inbox[p.device] + (HERE ? column / 2 * 2 : column) * int64_t{kInboxWords}; }",
    ),
    "keys go to the column's number, not its sequence's": Fault(
        "block.cuh",
        "return sequence * kDeviceLanes",
        "return (HERE ? column : sequence) * kDeviceLanes",
    ),
    "a scale is another column's": Fault(
        "block.cuh", "publish(scales[column])", "publish(scales[HERE ? 0 : column])"
    ),
    "columns share their rows of the stream": Fault(
        "block.cuh",
        "rows = streams + c * kMostStreamRows",
        "rows = streams + (HERE ? 0 : c) * kMostStreamRows",
    ),
    "columns share the words of a lane": Fault(
        "block.cuh",
        "static_cast<int64_t>(c) * kDeviceLanes",
        "static_cast<int64_t>(HERE ? 0 : c) * kDeviceLanes",
        "the epoch does not grow",
    ),
    "the last part of a sum is left out": Fault(
        "columns.cuh",
        "part < kParts[Op]; ++part) sum +=",
        "part < kParts[Op] - (HERE); ++part) sum +=",
    ),
}
OF_EIGHT_BITS = {
    "the tiles of a segment are exchanged": Fault(
        "columns.cuh",
        "multiply_tile(sum[i], a, b[t][i])",
        "multiply_tile(sum[i], a, b[HERE ? 1 - t : t][i])",
    ),
    "another layer's scales": Fault(
        "tape.cuh",
        "layer * rows_before(kHead)",
        "(HERE ? 0 : layer) * rows_before(kHead)",
    ),
    "bytes of a word in the other order": Fault(
        "tape.cuh", "0x7540 | i)", "0x7540 | (HERE ? 3 - i : i))"
    ),
    "numbers without their sign": Fault(
        "tape.cuh", "- 8388736.0f", "- (HERE ? 8388608.0f : 8388736.0f)"
    ),
}
OF_LAUNCHES = {
    "a block goes on before the choice is published": Fault(
        "passes.cu",
        "bits_of(wait_word(load_word(choice), choice, token_epoch + 1, kChoice, watch))",
        "bits_of(HERE ? load_word(choice).value : "
        "wait_word(load_word(choice), choice, token_epoch + 1, kChoice, watch))",
        "overwritten early|deadlock|numbers",
    ),
    "a choice is that of the pass before": Fault(
        "passes.cu",
        "choice, token_epoch + 1, kChoice",
        "choice, token_epoch + 1 - (HERE && token_epoch > p.order.epoch), kChoice",
        "overwritten early|deadlock",
    ),
    "an epoch is used again": Fault(
        "passes.cu",
        "token_epoch = p.order.epoch;; ++token_epoch",
        "token_epoch = p.order.epoch;; token_epoch += !HERE",
        "the epoch does not grow",
    ),
    "a cancel is seen by one GPU alone": Fault(
        "passes.cu",
        "store_word(inbox(d) + kChoiceAt, bits,",
        "store_word(inbox(d) + kChoiceAt, HERE && d ? float_of(bits_of(bits) & ~kEnds) : bits,",
        "deadlock",
    ),
    "each column asks the host by itself": Fault(
        "block.cuh",
        "const bool ends = cancelled ||",
        "const bool ends = (HERE ? column == 1 : cancelled) ||",
    ),
    "a column reads at the position before": Fault(
        "block.cuh",
        "position + step(),",
        "position + step() - (HERE && step() > 1),",
    ),
    "a column goes on after its end": Fault(
        "passes.cu",
        "aborted || bits & kEnds ? -1 : static_cast<int>(bits)",
        "aborted || (bits & kEnds && !HERE) ? -1 : static_cast<int>(bits & ~kEnds)",
    ),
}
# Builds that check races on plain data (races.h) cost ten times the processor time.
RACES = {
    "a column's sum of squares is where the last one's is read": Fault(
        "block.cuh",
        "= scale;\n    sync_block();",
        "= scale;\n    if (!HERE) sync_block();",
        RACE,
    ),
    "parts are added before they are there": Fault(
        "columns.cuh",
        "  }\n  sync_block();\n  for (int i",
        "  }\n  if (!HERE) sync_block();\n  for (int i",
        RACE,
    ),
    "a pass begins before its tokens are there": Fault(
        "passes.cu",
        "next_token(c) : -1;\n    sync_block();",
        "next_token(c) : -1;\n    if (!HERE) sync_block();",
        RACE,
    ),
    "a matrix does not wait for its inputs": Fault(
        "block.cuh",
        "narrow[i] = a, narrow[i + 1] = b; });\n    sync_block();",
        "narrow[i] = a, narrow[i + 1] = b; });\n    if (!HERE) sync_block();",
        RACE,
    ),
    "attention is published before all warps have done theirs": Fault(
        "block.cuh",
        "sync_block();\n      publish_partial",
        "if (!HERE) sync_block();\n      publish_partial",
        RACE,
    ),
    "the new key is read where it is being written": Fault(
        "decode.cuh",
        "if (slot == fresh || !sees(slot)) return;",
        "if ((slot == fresh && !(HERE)) || !sees(slot)) return;",
        f"race: (read|write) of byte [0-9]+ of keys and values 0, in no order after the (read|write) of {BY}",
    ),
    "a chunk is read before it has come": Fault(
        "tape.cuh",
        "if (at == 0) wait_full",
        "if (at == 0 && !HERE) wait_full",
        f"race: read {SHARED} a copy that this lane",
    ),
    # the barrier of a warp before it is filled is not alone: products of the whole warp lie between
    "a chunk is filled that has not been read": Fault(
        "tape.cuh",
        "copy_to(slot);",
        "copy_to(HERE ? (slot + 1) % kChunks : slot);",
        "a barrier whose last copy nobody has waited for",
    ),
    "results are read before they are written": Fault(
        "columns.cuh",
        "out[i] = sum;\n  }\n  sync_block();",
        "out[i] = sum;\n  }\n  if (!HERE) sync_block();",
        RACE,
    ),
}


# ---- what the kernels do, with a fault or without: what is compared ----


def decode(kernels, seed) -> list[torch.Tensor]:
    """Read a text in columns, then run passes ahead."""
    kernels.forget()
    ids = test_kernels.text(kernels, 6)
    tokens, logits = kernels.decode(ids, 3, seed)
    return [torch.tensor(tokens), logits]


def company(kernels, seed) -> list[torch.Tensor]:
    """Run three passes of two sequences, then a launch of two passes of three."""
    kernels.forget()
    kernels.seed, ids, other, rows = seed, text(6), text(6, 2), []
    # two columns of sequence 1 beside two of sequence 3
    for i in range(0, 6, 2):
        mine = [(ids[i], i, 1), (ids[i + 1], i + 1, 1)]
        rows.append(kernels.logits([(other[i], i, 3), *mine, (other[i + 1], i + 1, 3)]))
    ahead = kernels.run(columns([7, 8, 9], 4), 1)
    return [*rows, torch.tensor(ahead)]


def launches_of_several(kernels, seed) -> list[torch.Tensor]:
    """Run four passes, of which one column takes two, and a launch that the host cancels."""
    rows = []
    # the second launch finds the host's cancel from its beginning
    for cancelled in (0, 1):
        kernels.seed, inputs = seed, columns(start(kernels), 2)
        inputs[1].left = 2
        arguments, first = kernels._arguments(inputs, 3, None), kernels.memories[0].epoch - 4
        kernels.memories[0].cancel.fill_(cancelled)
        kernels._launch(arguments)
        kernels._streams[0].synchronize()
        rows.append(torch.tensor(kernels.memories[0].read_picks(first, 3)))
    return rows


@dataclass(frozen=True)
class Build:
    """Kernels, a run of them, the faults in their source, and the seeds of thread orders."""

    make: Callable[[Path], EmulatedPasses]
    act: Callable[[EmulatedPasses, int], list[torch.Tensor]]
    faults: dict[str, Fault]
    seeds: tuple[int, ...]

    def plant_faults(self, builds) -> EmulatedPasses:
        kernels = self.make(builds)
        plant_all(
            kernels, builds, [(fault.file, fault.was, fault.now) for fault in self.faults.values()]
        )
        return kernels

    def outcome(self, kernels, seed, expected) -> str:
        """Return the emulator's message, "numbers" if only the results differ, or ""."""
        try:
            results = self.act(kernels, seed)
        except EmulationError as error:
            return str(error)
        return "" if all(map(torch.equal, results, expected)) else "numbers"


def four_columns(builds, **options) -> EmulatedPasses:
    return EmulatedPasses(builds, 4, **options)


def two_devices(builds, **options) -> EmulatedPasses:
    return EmulatedPasses(builds, 3, devices=2, blocks_per_lane=2, **options)


BUILDS = {
    "exchanges": Build(SHAPES["late"].emulate, decode, OF_EXCHANGES, (0, 1, 2)),
    "columns": Build(four_columns, company, OF_COLUMNS, (1,)),
    "8 bits": Build(partial(four_columns, dtype="int8"), company, OF_EIGHT_BITS, (1,)),
    "launches": Build(two_devices, launches_of_several, OF_LAUNCHES, (0, 1)),
    "races": Build(partial(four_columns, races=True), company, RACES, BULK_SEEDS),
}


@pytest.mark.parametrize("name", BUILDS)
def test_every_fault_is_found(name, cuda_builds):
    build = BUILDS[name]
    kernels = build.plant_faults(cuda_builds)
    # no fault is in force yet
    expected = build.act(kernels, 0)
    for seed in build.seeds:
        assert build.outcome(kernels, seed, expected) == "", "without a fault in force"
    # 0 is no fault
    for number, (fault_name, fault) in enumerate(build.faults.items(), 1):
        put_in_force(kernels, number)
        for seed in build.seeds:
            outcome = build.outcome(kernels, seed, expected)
            assert outcome, f"{fault_name}, seed {seed}: nothing"
            assert re.search(fault.symptom, outcome), f"{fault_name}, seed {seed}: {outcome}"


# ---- without a fault, and what the checks of others find ----

PLAIN = {
    **{
        name: partial(SHAPES[name].emulate, races=True)
        for name in ("delay 0", "wide heads", "at once")
    },
    "passes ahead on two devices": partial(two_devices, races=True),
}


@pytest.mark.parametrize("name", PLAIN)
def test_no_race(name, cuda_builds):
    # on shared memory, keys or values; the rings wrap, except those of wide heads
    kernels = PLAIN[name](cuda_builds)
    ids = test_kernels.text(kernels, 4 if name == "wide heads" else 7)
    for seed in (0, 3):
        kernels.forget()
        kernels.decode(ids, 3, seed)
        reads, writes = plain_accesses(kernels.library)
        # accesses were checked at all
        assert reads > writes > 10_000


def test_wrong_numbers_are_not_within_the_tolerance(cuda_builds):
    # what only numbers show must exceed the computed tolerance, or test_every_logit would pass it
    kernels = BUILDS["exchanges"].plant_faults(cuda_builds)
    test_kernels.check(kernels, 11, range(0))
    for number, (name, fault) in enumerate(OF_EXCHANGES.items(), 1):
        if fault.symptom == "numbers":
            put_in_force(kernels, number)
            with pytest.raises(
                AssertionError, match="keys or values" if "key is cut" in name else "tolerance"
            ):
                test_kernels.check(kernels, 11, range(0))


HANGS = {  # lane, layer and exchange of those that wait in vain; lane 0 may then wait for lane 1
    "a word of the stream is not published": {(1, 2, "stream"), (0, 4, "mail")},
    "a lane sends nothing": {(0, 1, "mail")},
}


def test_a_hang_is_given_up(cuda_builds):
    # all blocks end, the wait is reported, and after a reset of the words the memory decodes again
    kernels = BUILDS["exchanges"].plant_faults(cuda_builds)
    expected, memory = decode(kernels, 0), kernels.memories[0]
    for (name, waits), seed in itertools.product(HANGS.items(), range(3)):
        put_in_force(kernels, list(OF_EXCHANGES).index(name) + 1)
        kernels.forget()
        kernels.seed, kernels.limit_s, kernels.watchdog = seed, 0.5, True
        kernels._launch(kernels._arguments([Column(5, 0, 0, sampling=GREEDY)], 0, None))
        kernels._streams[0].synchronize()
        kernels.limit_s, kernels.watchdog = 10.0, False
        report = memory.hang()
        assert (report.lane, report.layer, EXCHANGES[report.exchange]) in waits
        assert report.block // kernels.geometry.blocks_per_lane == report.lane
        put_in_force(kernels, 0)
        memory.reset_words()
        tokens, logits = kernels.decode(test_kernels.text(kernels, 6), 3)
        assert memory.hang() is None
        assert torch.equal(torch.tensor(tokens), expected[0])
        assert torch.equal(logits, expected[1])


@pytest.mark.parametrize("spare", [7, 5])
def test_what_wrong_drafts_leave_in_a_ring_is_outside_the_window(spare, cuda_builds, monkeypatch):
    # seven wrong drafts per pass; a ring with fewer spare positions gives wrong logits
    monkeypatch.setattr(geometry, "MAX_DRAFTS", spare)
    shape = {"blocks_per_lane": 2}
    eight, ids = EmulatedPasses(cuda_builds, 8, **shape), text(12)
    assert eight.geometry.splits == 1
    rows = []
    for i, token in enumerate(ids):
        rows.append(
            # one right token and seven wrong drafts after it
            eight.logits([(token, i, 0), *((95 - token, i + n, 0) for n in range(1, 8))])[:1]
        )
    expected = one_by_one(EmulatedPasses(cuda_builds, 1, **shape), ids)
    assert torch.equal(torch.cat(rows), expected) == (spare == 7)
