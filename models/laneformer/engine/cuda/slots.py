"""What earlier sequences leave for later ones: their keys and values, whole sequences in slots of device memory.

A sequence goes on in the slot whose ids it continues, without a copy. Where it parts from one, it takes another slot, a
new one or the least recently used, and copies what it shares; the slot that it parted from stays. A layer with a window
has a ring, which forgets: a prompt can start where no ring has lost a key of the window before it. So before a sequence
grows beyond a ring, the state at its prompt's end is kept as a slot of its own: answers can be made again, and edited
messages start from the end of an earlier prompt. A copy of `2b`'s 4,096 positions (252 MB) is calculated as 0.1 ms.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from .memory import DeviceMemory

MOST_SLOTS = 64
NOTHING = np.empty(0, np.int64)


@dataclass(eq=False)
class Slot:
    """Keys and values of one sequence, of each device. written: positions of which the rings have had to make room."""

    kv: list[torch.Tensor]
    ids: np.ndarray = field(default_factory=lambda: NOTHING)  # int64
    written: int = 0
    used: int = 0


class Slots:
    """The slots of all devices; `memory.kv` is always that of the current one, which holds `ids` once `holds` said so.

    cache_bytes: of each device, for slots beside the first.
    """

    def __init__(self, memories: Sequence[DeviceMemory], cache_bytes: int):
        self.memories, self._clock = memories, itertools.count(1)
        self.current = Slot([memory.kv for memory in memories])
        self.slots = [self.current]
        self.most = min(MOST_SLOTS, 1 + cache_bytes // self.current.kv[0].nbytes)
        g, layers = memories[0].geometry, range(memories[0].geometry.config.num_hidden_layers)
        rings = [(g.splits * g.kv_slots(i), g.config.window(i)) for i in layers]
        context = g.config.max_position_embeddings
        self.ring = min(ring for ring, _ in rings)  # positions that every layer still has, whatever came after them
        # how far a sequence can go back when its rings have wrapped
        self.back = min((ring - window + 1 for ring, window in rings if window and ring < context), default=context)

    def begin(self, ids: Sequence[int], most: int, reuse_prefix: bool = True) -> int:
        """Make the slot for a sequence of these ids the current one; how many of the first `most` ids it has."""
        wanted = np.array(ids[:most], np.int64)
        start, best = max(((self.reusable(s, wanted), s) for s in self.slots), key=lambda p: (p[0], p[1].used))
        start = start if reuse_prefix else 0
        if start and start == len(best.ids):
            slot = best
        else:
            slot = self._free(best if start else None)
            slot.written = best.written if start else 0
            if start and slot is not best:
                self._copy(best, slot, start)
        self._select(slot)
        return start

    def keep(self, ids: Sequence[int], total: int) -> None:
        """The current slot has `ids` and will have `total`: set them aside where its rings would forget them."""
        if len(ids) and total > self.ring and (slot := self._free(self.current)) is not self.current:
            self._copy(self.current, slot, len(ids))
            slot.ids, slot.written, slot.used = np.array(ids), max(self.current.written, len(ids)), next(self._clock)
            self.current.used = next(self._clock)

    def holds(self, ids: Sequence[int], surplus: int = 0) -> None:
        """The current slot has these ids now, and `surplus` positions after them were written in vain."""
        slot = self.current
        slot.ids, slot.written = np.array(ids), max(slot.written, len(ids) + surplus)

    def reusable(self, slot: Slot, ids: np.ndarray) -> int:
        """How many of the ids a sequence need not read that starts from this slot."""
        most = min(len(ids), len(slot.ids))
        differs = np.flatnonzero(ids[:most] != slot.ids[:most])
        same = int(differs[0]) if len(differs) else most
        return same if slot.written <= self.ring or slot.written - same <= self.back else 0

    def _select(self, slot: Slot) -> None:
        slot.ids, slot.used, self.current = NOTHING, next(self._clock), slot
        for memory, kv in zip(self.memories, slot.kv, strict=True):
            memory.kv = kv

    def _free(self, kept: Slot | None) -> Slot:
        """A slot without ids, a new one, or the least recently used but `kept`, if there is another."""
        if empty := next((slot for slot in self.slots if not len(slot.ids) and slot is not kept), None):
            return empty
        if len(self.slots) < self.most:
            try:
                self.slots.append(Slot([torch.zeros_like(kv) for kv in self.current.kv]))
                return self.slots[-1]
            except torch.OutOfMemoryError:
                self.most = len(self.slots)
        return min((slot for slot in self.slots if slot is not kept), key=lambda s: s.used, default=self.current)

    def _copy(self, source: Slot, target: Slot, count: int) -> None:
        """The first `count` positions; of a ring that is shorter, all of it."""
        for memory, here, there in zip(self.memories, source.kv, target.kv, strict=True):
            g = memory.geometry
            for layer in range(g.config.num_hidden_layers):
                used = -(-count // g.splits)
                memory.kv_layer(layer, there)[:, :, :, :used] = memory.kv_layer(layer, here)[:, :, :, :used]
