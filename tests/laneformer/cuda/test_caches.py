"""Tests of reused sequences on a GPU: a prompt starts only where all positions in its windows are its own."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from laneformer.engine.cpu import _core
from laneformer.engine.cuda import executor as executor_module
from laneformer.engine.cuda import geometry
from laneformer.engine.cuda.caches import Caches
from laneformer.engine.cuda.executor import CudaExecutor
from laneformer.engine.cuda.memory import DeviceMemory
from laneformer.engine.cuda.planning import plan
from laneformer.engine.cuda.structures import Column
from laneformer.engine.decoder import Request
from tests.laneformer.cuda.harness import SMALL, small_config
from tests.laneformer.cuda.stand_ins import answers

CONFIG = small_config(sliding_window=5, max_position_embeddings=48)
# rings of 6: two positions can be gone back when they have wrapped
GEOMETRY = plan(CONFIG, "bf16", SMALL, warps=2)
WHOLE = 2  # a layer without a window


@pytest.fixture(autouse=True)
def without_drafts(monkeypatch):
    # rings then need no spare positions
    monkeypatch.setattr(geometry, "MAX_DRAFTS", 0)


def number_after(before: int, token: int) -> int:
    return (31 * before + token + 1) % 32749


def continue_text(ids: list[int], count: int) -> list[int]:
    """Return the only right continuation of a text."""
    number, new_ids = 0, list[int]()
    for token in ids[:-1]:
        number = number_after(number, token)
    for _ in range(count):
        number = number_after(number, [*ids, *new_ids][-1])
        new_ids.append(number % 3)
    return new_ids


# The schedule decides what is reused, the executor copies it; both are as on a GPU.
class Numbers:
    """Passes in which a position's keys and values are one number that depends on all ids up to it."""

    extra_passes = 0

    def __init__(self, sequences: int, caches: int, unread: int = 64):
        self.config, self.columns, self.sequences, self.unread = (
            CONFIG,
            sequences,
            sequences,
            unread,
        )
        kv = torch.zeros(caches * GEOMETRY.lanes_per_device * GEOMETRY.kv_lane, dtype=torch.int16)
        memory: Any = object.__new__(DeviceMemory)
        memory.kv, memory.geometry, memory.device = kv, GEOMETRY, "cpu"
        self.caches = Caches([memory])

    def place(self, cache: int, layer: int, positions: range) -> torch.Tensor:
        """Return (positions, numbers) there."""
        position = torch.tensor([*positions], dtype=torch.int64)
        (memory,) = self.caches.of(cache)
        kv = memory.kv_layer(layer)
        slots = position // GEOMETRY.splits % GEOMETRY.kv_slots(layer)
        return kv[:, :, position % GEOMETRY.splits, slots].transpose(0, 2).flatten(1)

    def run(self, columns: Sequence[Column], *_: Any) -> list[list[int]]:
        return [[self._run(c.sequence, c.position, c.token) for c in columns]]

    def _run(self, cache: int, position: int, token: int) -> int:
        # each layer sees the same numbers, as far back as its window reaches
        numbers = self.place(cache, WHOLE, range(position))[:, 0]
        number = number_after(int(numbers[-1]) if position else 0, token)
        for layer in range(CONFIG.num_hidden_layers):
            visible = range(max(0, position + 1 - (CONFIG.window(layer) or position + 1)), position)
            assert (self.place(cache, layer, visible) == numbers[visible.start :, None]).all(), (
                position,
                layer,
            )
            (memory,) = self.caches.of(cache)
            slot = position // GEOMETRY.splits % GEOMETRY.kv_slots(layer)
            memory.kv_layer(layer)[:, :, position % GEOMETRY.splits, slot] = number
        return number % 3

    def read(
        self, ids: Sequence[int], cache: int, position: int, first_row: int
    ) -> Iterator[torch.Tensor]:
        for i, token in enumerate(ids):
            self._run(cache, position + i, token)
        yield from ()


@pytest.mark.parametrize(
    ("sequences", "caches", "unread"), [(1, 1, 64), (1, 2, 3), (2, 2, 64), (3, 4, 3)]
)
def test_random_conversations(sequences, caches, unread, monkeypatch):
    # also with prompts in chunks
    monkeypatch.setattr(executor_module, "PROMPT_CHUNK_TOKENS", 4)
    draw = random.Random(10 * sequences + caches)
    executor, texts, reused_tokens = CudaExecutor(Numbers(sequences, caches, unread)), [[1]], 0
    for _ in range(30):
        prompts = []
        for _ in range(draw.randint(1, 4)):
            text = draw.choice(texts)
            begins = text[: draw.randint(0, min(len(text), 30))]
            prompts.append(begins + [draw.randint(0, 2) for _ in range(draw.randint(1, 8))])
        counts = [draw.randint(1, 9) for _ in prompts]
        for result, prompt, count in zip(
            answers(executor, map(Request, prompts, counts)), prompts, counts, strict=True
        ):
            assert result.tokens == continue_text(prompt, count)
            reused_tokens += result.whole.statistics["reused_tokens"]
            texts = [*texts[-4:], prompt + result.tokens]
    assert reused_tokens > 10 * caches


@pytest.mark.parametrize(("ring", "back", "raises"), [(6, 2, False), (7, 2, True), (6, 3, True)])
def test_a_number_too_large_is_found(ring, back, raises, monkeypatch):
    # reads of a position that its ring no longer has are detected
    monkeypatch.setattr(Caches, "shape", lambda self: _core.KvShape(48, 1, ring, back))
    errors = []
    for cached, shared in ((10, 7), (7, 3)):
        executor, text = CudaExecutor(Numbers(1, 1)), [i % 3 for i in range(11)]
        for prompt in (text[:cached], [*text[:shared], 5]):
            (result,) = answers(executor, [Request(prompt, 1)])
        errors.append(result.whole.error is not None)
    assert any(errors) == raises
