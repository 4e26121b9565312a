"""Random shapes of the decode kernels, and faults planted in their source: each is found, by a
check that is named.

The proof that every word is written before it is read, that none is overwritten early and that nobody waits
for ever is the emulator's, for all orders of the threads that a launch can have (order.h). Here it is asked
for, and shown to fail where it must.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from laneformer.engine.cuda.structures import EXCHANGES, Column
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.emulated import GREEDY, EmulatedPasses
from tests.laneformer.cuda.emulator import EmulationError
from tests.laneformer.cuda.planted import plant_all, put_in_force
from tests.laneformer.cuda.shapes import SHAPES, drawn
from tests.laneformer.cuda.test_kernels import check, text
from tests.proofs import KERNEL_SOURCES

pytestmark = [
    pytest.mark.proof(*KERNEL_SOURCES),
    pytest.mark.skipif(bool(emulator.MISSING), reason=emulator.MISSING),
]
COUNT = int(os.environ.get("CUDA_SHAPES", "6"))
TOKENS = 6
SEEDS = range(3)


@pytest.mark.parametrize("seed", range(COUNT))
def test_random_shapes(seed: int, cuda_builds: Path) -> None:
    """Numbers and order; CUDA_SHAPES=1000 tries more of them."""
    shape = drawn(seed)
    print(shape)
    check(shape.emulated(cuda_builds), 7, range(2))


# ---- planted faults ----


@dataclass(frozen=True)
class Fault:
    """A change of one place, in force while `planted` is its number; HERE in `now` asks for that (planted.py)."""

    file: str
    was: str
    now: str
    found: str  # by: a pattern of the emulator's message, or "numbers"
    always: bool = True  # in every order of the threads, or in some


OVERWRITTEN = "overwritten early(.|\n)*inbox"
FAULTS = {
    "the mail of a lane is left out": Fault(
        "block.cuh", "sum += sent[l].value", "sum += HERE && l != lane ? 0.0f : sent[l].value", "numbers"
    ),
    "lanes are swapped": Fault(
        "block.cuh", "mail_at(module, layer, lane) + first + r, out[r]",
        "mail_at(module, layer, HERE ? 1 - lane : lane) + first + r, out[r]", "numbers",
    ),
    "mail is read a layer late": Fault(
        "block.cuh", "layer : layer - kDelay;", "layer : layer - kDelay - (HERE && layer > kDelay);", "numbers"
    ),
    "mail is read a layer early": Fault(
        "block.cuh", "const int from = now ? layer : layer", "const int from = now ? layer : HERE + layer",
        "deadlock: (.|\n)*for inbox",
    ),
    "mail has the epoch of the next layer": Fault(
        "block.cuh", "out[r], epoch_of(layer));", "out[r], epoch_of(layer) + HERE);",
        "deadlock: .* or has a wrong epoch(.|\n)*for inbox",
    ),
    "a lane sends nothing": Fault(
        "block.cuh", "if (now || kBroadcasts[module][layer] ||",
        "if (!(HERE && lane == 1) && (now || kBroadcasts[module][layer]) ||",
        "deadlock: nothing can go on(.|\n)*for inbox 0.*which holds epoch 0",
    ),
    "a word of the stream is not published": Fault(
        "block.cuh", "store_word(words + kStreamAt + module",
        "if (!(HERE && lane == 1 && layer == 2 && module == 0 && first + r == 5)) "
        "store_word(words + kStreamAt + module",
        "deadlock: (.|\n)* poll",
    ),
    "a matrix does not wait for its inputs": Fault(
        "block.cuh", "narrow[i] = a, narrow[i + 1] = b; });\n    sync_block();",
        "narrow[i] = a, narrow[i + 1] = b; });\n    if (!HERE) sync_block();", "numbers", always=False,
    ),
    "attention is published before all warps have done theirs": Fault(
        "block.cuh", "sync_block();\n      publish_partial",
        "if (!HERE) sync_block();\n      publish_partial", "numbers", always=False,
    ),
    "a chunk is read before it has come": Fault(
        "tape.cuh", "if (at == 0) wait_for", "if (at == 0 && !HERE) wait_for",
        "nobody has waited for", always=False,
    ),
    "a window shows one key too many": Fault(
        "decode.cuh", "at > position - kWindows[layer]", "at > position - kWindows[layer] - HERE", "numbers"
    ),
    "a key is cut to 16 bits, not rounded": Fault(
        "block.cuh", "pack_halves(k.x, k.y)",
        "HERE ? (bits_of(k.y) & 0xffff0000u) | bits_of(k.x) >> 16 : pack_halves(k.x, k.y)", "numbers",
    ),
    "mail has one slot": Fault(
        "exchange.cuh", "+ layer % kMailSlots)", "+ layer % (HERE ? 1 : kMailSlots))", OVERWRITTEN
    ),
    # one module alone is sent: with both, this one slot could be spared
    "mail has one slot too few": Fault(
        "exchange.cuh", "kMailSlots + layer %", "kMailSlots + layer % (HERE ? kMailSlots - 1 : kLayers) %", OVERWRITTEN
    ),
}  # fmt: skip


def outcome(emulated: EmulatedPasses, seed: int, right: tuple[list[int], torch.Tensor]) -> str:
    """What the emulator says of a launch; "numbers" where it says nothing and tokens or logits differ."""
    emulated.forget()
    try:
        tokens, logits = emulated.decode(text(emulated, TOKENS), 3, seed)
    except EmulationError as error:
        return str(error)
    return "" if tokens == right[0] and torch.equal(logits, right[1]) else "numbers"


@dataclass
class Planted:
    """The kernels with all faults in their source, and what they give without."""

    emulated: EmulatedPasses
    right: tuple[list[int], torch.Tensor]

    def plant(self, name: str | None) -> None:
        put_in_force(self.emulated, 0 if name is None else list(FAULTS).index(name) + 1)


@pytest.fixture(scope="module")
def planted(cuda_builds: Path) -> Planted:
    emulated = SHAPES["late"].emulated(cuda_builds)
    made = Planted(emulated, emulated.decode(text(emulated, TOKENS), 3))
    plant_all(emulated, cuda_builds, [(fault.file, fault.was, fault.now) for fault in FAULTS.values()])
    assert outcome(emulated, 0, made.right) == "", "without a fault in force"
    return made


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, planted: Planted) -> None:
    fault, seen = FAULTS[name], list[str]()
    planted.plant(name)
    for seed in SEEDS if fault.always else range(20):
        seen.append(outcome(planted.emulated, seed, planted.right))
        assert not seen[-1] or re.search(fault.found, seen[-1]), seen[-1]
        if seen[-1] and not fault.always:
            break
    assert all(seen) if fault.always else any(seen)


@pytest.mark.parametrize(
    "name", [name for name, fault in FAULTS.items() if fault.found == "numbers" and fault.always]
)
def test_wrong_numbers_are_not_within_the_tolerance(name: str, planted: Planted) -> None:
    planted.plant(None)
    check(planted.emulated, 11, range(0))
    planted.plant(name)
    with pytest.raises(AssertionError, match="keys or values" if "key is cut" in name else "tolerance"):
        check(planted.emulated, 11, range(0))


# ---- the kernels' own watchdog ----


@pytest.mark.parametrize(
    ("name", "waits"),
    [
        (
            "a word of the stream is not published",
            {(1, 2, "stream"), (0, 4, "mail")},
        ),  # lane 0 then waits for lane 1
        ("a lane sends nothing", {(0, 1, "mail")}),
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_hang_is_given_up(name: str, waits: set[tuple[int, int, str]], seed: int, planted: Planted) -> None:
    """All blocks end, the report names a wait in vain, and the same memory decodes again when
    its words are reset.
    """
    emulated, memory = planted.emulated, planted.emulated.memories[0]
    planted.plant(name)
    emulated.forget()
    emulated.seed, emulated.limit_s, emulated.watchdog = seed, 0.5, True
    emulated._launch(emulated._arguments([Column(5, 0, 0, sampling=GREEDY)], 0, None))
    emulated._streams[0].synchronize()
    emulated.limit_s, emulated.watchdog = 10.0, False
    report = memory.hang()
    assert report is not None
    assert (report.lane, report.layer, EXCHANGES[report.exchange]) in waits
    assert report.block // emulated.geometry.blocks_per_lane == report.lane
    planted.plant(None)
    memory.reset_words()
    tokens, logits = emulated.decode(text(emulated, TOKENS), 3)
    assert memory.hang() is None
    assert tokens == planted.right[0]
    assert torch.equal(logits, planted.right[1])
