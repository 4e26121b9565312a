"""Keys and values of sequences in device memory: where the schedule's KvOps are carried out.

A layer with a sliding window has a ring that overwrites, so a sequence can start wherever no ring has lost a key of
the window before it; the schedule goes by two numbers of the rings (schedule/prefix.h). A copy of `2b`'s 4,096
positions (252 MB) is calculated as 0.1 ms.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..cpu import _core
from .memory import DeviceMemory

MAX_CACHES = 64


class Caches:
    """As many as `memory.kv` is of. `beside`: memories of a head's block, which has as many."""

    def __init__(self, memories: Sequence[DeviceMemory], beside: Sequence[DeviceMemory] = ()):
        self.memories, self._all = memories, [*memories, *beside]
        one = [m.geometry.lanes_per_device * m.geometry.kv_lane for m in self._all]
        each = (memory.kv.split(size) for memory, size in zip(self._all, one, strict=True))
        self.kv = [list(kv) for kv in zip(*each, strict=True)]

    def shape(self) -> _core.KvShape:
        g = self.memories[0].geometry
        context, layers = g.config.max_position_embeddings, range(g.config.num_hidden_layers)
        rings = [(g.splits * g.kv_slots(i), g.config.window(i)) for i in layers]
        shorter = [ring - window + 1 for ring, window in rings if window and ring < context]
        count, ring = len(self.kv), min(ring for ring, _ in rings)
        return _core.KvShape(context, count, ring, min(shorter, default=context))

    def apply(self, op: _core.KvOp) -> None:
        if op.kind == _core.KvKind.copy:
            self._copy(op.source, op.cache, op.end)

    def of(self, cache: int, beside: bool = False) -> list[DeviceMemory]:
        """The devices' memory, with this cache's keys and values in the place of all; or that of the head's block."""
        every = [memory.of(kv) for memory, kv in zip(self._all, self.kv[cache], strict=True)]
        return every[len(self.memories) :] if beside else every[: len(self.memories)]

    def _copy(self, source: int, target: int, count: int) -> None:
        """The first `count` positions; of a ring that is shorter, all of it."""
        for memory, here, there in zip(self._all, self.kv[source], self.kv[target], strict=True):
            g = memory.geometry
            used = -(-count // g.splits)
            for layer in range(g.config.num_hidden_layers):
                memory.kv_layer(layer, there)[:, :, :, :used] = memory.kv_layer(layer, here)[:, :, :, :used]
