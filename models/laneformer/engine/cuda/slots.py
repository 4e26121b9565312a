"""The prefix cache on a GPU: keys and values of whole sequences in slots of device memory.

A sequence that continues a cached one extends that slot in place. One that diverges takes another slot, a new
one or the least recently used, and copies the shared prefix; the original slot stays. A layer with a sliding
window has a ring that overwrites: a prompt can start wherever no ring has lost a key of the window before it.
So before a sequence outgrows a ring, the state at its prompt's end is kept as a slot of its own: answers can
be regenerated, and edited messages start from the end of an earlier prompt. A copy of
`2b`'s 4,096 positions (252 MB) is calculated as 0.1 ms.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from .memory import DeviceMemory

MAX_SLOTS = 64
NOTHING = np.empty(0, np.int64)


@dataclass(eq=False)
class Slot:
    """Keys and values of one sequence, of each device. written: positions of which the rings have
    had to make room.
    """

    kv: list[torch.Tensor]
    ids: np.ndarray = field(default_factory=lambda: NOTHING)  # int64
    written: int = 0
    used: int = 0
    number: int = 0  # of those that share one tensor
    running: bool = False  # a sequence of passes writes there


class Slots:
    """The slots of all devices; `memory.kv` is always that of the current one, which holds `ids`
    once `holds` said so.

    Where `memory.kv` is of several sequences, there are as many slots, and several run at a time (passes.py):
    `choose` takes the place of `begin`. cache_bytes: of each device, for slots beside these.
    """

    def __init__(self, memories: Sequence[DeviceMemory], cache_bytes: int):
        self.memories, self._clock = memories, itertools.count(1)
        one = memories[0].geometry.lanes_per_device * memories[0].geometry.kv_lane
        parts = zip(*(memory.kv.split(one) for memory in memories), strict=True)
        self.slots = [Slot(list(kv), number=i) for i, kv in enumerate(parts)]
        self.current = self.slots[0]
        self.most = min(MAX_SLOTS, len(self.slots) + cache_bytes // self.current.kv[0].nbytes)
        g, layers = memories[0].geometry, range(memories[0].geometry.config.num_hidden_layers)
        rings = [(g.splits * g.kv_slots(i), g.config.window(i)) for i in layers]
        context = g.config.max_position_embeddings
        self.ring = min(
            ring for ring, _ in rings
        )  # positions that every layer still has, whatever came after them
        # how far a sequence can go back when its rings have wrapped
        self.back = min(
            (ring - window + 1 for ring, window in rings if window and ring < context), default=context
        )

    def begin(self, ids: Sequence[int], most: int, reuse_prefix: bool = True) -> int:
        """Make the slot for a sequence of these ids the current one; how many of the first `most` ids it has."""
        slot, start = self.choose(ids, most, reuse_prefix)
        self._select(slot)
        return start

    def choose(self, ids: Sequence[int], most: int, reuse_prefix: bool = True) -> tuple[Slot, int]:
        """A slot for a sequence of these ids, where nobody runs, and how many of the first `most` ids it has."""
        wanted = np.array(ids[:most], np.int64)
        start, best = max(
            ((self.reusable(s, wanted), s) for s in self.slots), key=lambda p: (p[0], p[1].used)
        )
        start = start if reuse_prefix else 0
        if start and start == len(best.ids) and not best.running:
            slot = best
        else:
            slot = self._free(best if start else None)
            slot.written = best.written if start else 0
            if start and slot is not best:
                self._copy(best, slot, start)
        slot.ids, slot.used = NOTHING, next(self._clock)
        return slot, start

    def keep(self, ids: Sequence[int], total: int, slot: Slot | None = None) -> None:
        """The (current) slot has `ids` and will have `total`: set them aside where its
        rings would forget them.
        """
        own = slot or self.current
        if len(ids) and total > self.ring and (aside := self._free(own)) is not own:
            self._copy(own, aside, len(ids))
            aside.ids, aside.written, aside.used = (
                np.array(ids),
                max(own.written, len(ids)),
                next(self._clock),
            )
            own.used = next(self._clock)

    def holds(self, ids: Sequence[int], surplus: int = 0, slot: Slot | None = None) -> None:
        """The (current) slot has these ids now, and `surplus` positions after them were written in vain."""
        slot = slot or self.current
        slot.ids, slot.written = np.array(ids), max(slot.written, len(ids) + surplus)

    def reusable(self, slot: Slot, ids: np.ndarray) -> int:
        """How many of the ids a sequence need not read that starts from this slot."""
        most = min(len(ids), len(slot.ids))
        differs = np.flatnonzero(ids[:most] != slot.ids[:most])
        same = int(differs[0]) if len(differs) else most
        return same if slot.written <= self.ring or slot.written - same <= self.back else 0

    def _select(self, slot: Slot) -> None:
        self.current = slot
        for memory, kv in zip(self.memories, slot.kv, strict=True):
            memory.kv = kv

    def _free(self, kept: Slot | None) -> Slot:
        """A slot without ids, a new one, or the least recently used but `kept`, if there is another."""
        idle = [slot for slot in self.slots if not slot.running and slot is not kept]
        if empty := next((slot for slot in idle if not len(slot.ids)), None):
            return empty
        if len(self.slots) < self.most:
            try:
                self.slots.append(Slot([torch.zeros_like(kv) for kv in self.current.kv]))
                return self.slots[-1]
            except torch.OutOfMemoryError:
                self.most = len(self.slots)
        return min(idle, key=lambda s: s.used, default=kept or self.current)

    def _copy(self, source: Slot, target: Slot, count: int) -> None:
        """The first `count` positions; of a ring that is shorter, all of it."""
        for memory, here, there in zip(self.memories, source.kv, target.kv, strict=True):
            g = memory.geometry
            for layer in range(g.config.num_hidden_layers):
                used = -(-count // g.splits)
                memory.kv_layer(layer, there)[:, :, :, :used] = memory.kv_layer(layer, here)[:, :, :, :used]
