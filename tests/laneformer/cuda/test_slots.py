"""What earlier sequences leave on a GPU: a prompt starts only where all that its windows show is
there, and its own.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from laneformer.engine.cuda.memory import DeviceMemory
from laneformer.engine.cuda.planning import plan
from laneformer.engine.cuda.slots import Slot, Slots
from tests.laneformer.cuda.harness import SMALL, small_config

CONFIG = small_config(sliding_window=5, max_position_embeddings=48)  # rings of 6
GEOMETRY = plan(CONFIG, "bf16", SMALL, warps=2)


def slots(count: int, geometry: Any = GEOMETRY) -> Slots:
    kv = torch.zeros(geometry.lanes_per_device * geometry.kv_lane, dtype=torch.int16)
    memory: Any = SimpleNamespace(kv=kv, geometry=geometry)
    memory.kv_layer = lambda layer, kv=None: DeviceMemory.kv_layer(memory, layer, kv)
    return Slots([memory], (count - 1) * kv.nbytes)


class Sequence:
    """A sequence in the current slot: each position holds a number of all ids up to it,
    checked as attention reads.
    """

    def __init__(self, slots: Slots, ids: list[int], at: int):
        self.slots, self.ids, self.at, self.memory = slots, ids, at, slots.memories[0]

    def place(self, layer: int, positions: Any) -> torch.Tensor:
        """(positions, numbers) there."""
        g, at = self.memory.geometry, torch.tensor([*positions], dtype=torch.int64)
        kv = self.memory.kv_layer(layer)
        return kv[:, :, at % g.splits, at // g.splits % g.kv_slots(layer)].transpose(0, 2).flatten(1)

    def check(self, position: int) -> None:
        """What attention sees from a position that is about to be read."""
        for layer in range(CONFIG.num_hidden_layers):
            seen = range(max(0, position + 1 - (CONFIG.window(layer) or position + 1)), position)
            right = torch.tensor([self.number(i) for i in seen], dtype=torch.int16)
            assert (self.place(layer, seen) == right[:, None]).all(), (position, layer)

    def number(self, position: int) -> int:
        return hash(tuple(self.ids[: position + 1])) % 32749

    def read(self, end: int) -> None:
        self.check(self.at)
        g = self.memory.geometry
        for position in range(self.at, end):
            for layer in range(CONFIG.num_hidden_layers):
                kv = self.memory.kv_layer(layer)
                kv[:, :, position % g.splits, position // g.splits % g.kv_slots(layer)] = self.number(
                    position
                )
        self.check(end)
        self.at = end


def request(slots: Slots, prompt: list[int], answer: list[int], surplus: int = 0, fails: bool = False) -> int:
    """As SequenceDecoder goes about it; how many ids of the prompt it had."""
    at = slots.begin(prompt, len(prompt) - 1)
    sequence = Sequence(slots, prompt + answer, at)
    sequence.read(len(prompt) - 1)
    slots.keep(prompt[:-1], len(prompt) + len(answer) + surplus - 1)
    known = len(prompt) + len(answer) - 1
    sequence.read(known)
    sequence.ids = sequence.ids + [9] * surplus
    sequence.read(known + surplus)
    if not fails:
        slots.holds(sequence.ids[:known], surplus)
    return at


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_random_conversations(count: int) -> None:
    draw = random.Random(count)
    kept, texts, reused = slots(count), [[1]], 0
    for _ in range(60):
        text = draw.choice(texts)
        prompt = text[: draw.randint(0, min(len(text), 30))] + [
            draw.randint(0, 2) for _ in range(draw.randint(1, 8))
        ]
        answer = [draw.randint(0, 2) for _ in range(draw.randint(1, 6))]
        reused += request(kept, prompt, answer, draw.choice((0, 0, 3)), draw.random() < 0.1)
        texts = [*texts[-4:], prompt + answer]
        assert len(kept.slots) <= count
        assert kept.memories[0].kv is kept.current.kv[0]
    assert reused > 20 * count


def test_what_each_turn_finds() -> None:
    """Longer than the rings: the same prompt again, the next turn, another conversation, an edited message."""
    kept = slots(6)
    system, question, other = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [12, 13, 14, 15]
    assert request(kept, system + question, [20] * 9) == 0
    assert (
        request(kept, system + question, [21] * 9) == 10
    )  # from the prompt's end, where the rings were kept
    first = system + question + [21] * 9
    assert request(kept, [*first, 30, 31], [22] * 9) == len(first) - 1
    assert request(kept, other * 3, [23] * 9) == 0
    assert request(kept, [*first, 30, 31, *[22] * 9, 32], [24] * 9) == len(first) + 2 + 8
    assert request(kept, other * 3, [26] * 9) == 11
    assert request(slots(1), other * 3, [27]) == 0


@pytest.mark.parametrize(
    ("written", "held", "ids", "start"),
    [
        (0, "", "abc", 0),
        (3, "abc", "abcde", 3),
        (10, "abcdefghij", "abcdefghijk", 10),  # goes on, though rings have wrapped
        (10, "abcdefghij", "abcdefgh", 8),  # two back: what the ring lost is outside the window
        (10, "abcdefghij", "abcdefg", 0),
        (11, "abcdefghi", "abcdefghi", 9),
        (12, "abcdefghi", "abcdefghi", 0),  # three more were written in vain
        (6, "abcdef", "abcx", 3),  # rings of six have everything still
        (6, "abcdef", "xbcdef", 0),
    ],
)
def test_where_a_prompt_can_start(written: int, held: str, ids: str, start: int) -> None:
    kept = slots(1)
    assert (kept.ring, kept.back) == (6, 2)
    slot = Slot([], np.array([*map(ord, held)], np.int64), written)
    assert kept.reusable(slot, np.array([*map(ord, ids)])) == start


def test_a_full_gpu_has_fewer_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = slots(6)
    request(kept, [1, 2, 3], [4])

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "zeros_like", full)
    assert request(kept, [2, 2, 3], [4] * 9) == 0
    assert request(kept, [2, 2, 3, *[4] * 9, 5], [4]) == 11
    assert (len(kept.slots), kept.most) == (1, 1)


def test_going_back_twice_is_further_than_each_time() -> None:
    kept, text = slots(1), [*range(10)]
    assert request(kept, [*text, 10], []) == 0
    assert request(kept, [*text[:8], 50, 51], []) == 8  # position 9 is still the first text's
    assert request(kept, [*text[:7], 60, 61], []) == 0
