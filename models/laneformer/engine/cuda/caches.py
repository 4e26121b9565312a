"""Keys and values of sequences in device memory, on which the schedule's KvOps act."""

from __future__ import annotations

from collections.abc import Sequence

from ..cpu import _core
from .memory import DeviceMemory

MAX_CACHES = 64


class Caches:
    """Caches of sequences, as many as `memory.kv` holds.

    Attributes:
        kv: Of each cache, the numbers on each device.
    """

    def __init__(self, memories: Sequence[DeviceMemory]):
        self.memories, g = memories, memories[0].geometry
        kv_by_device = [memory.kv.split(g.lanes_per_device * g.kv_lane) for memory in memories]
        self.kv = [list(kv) for kv in zip(*kv_by_device, strict=True)]

    def shape(self) -> _core.KvShape:
        g = self.memories[0].geometry
        context, layers = g.config.max_position_embeddings, range(g.config.num_hidden_layers)
        rings = [(g.splits * g.kv_slots(i), g.config.window(i)) for i in layers]
        # a layer with a sliding window has a ring that overwrites, so a sequence can start wherever no
        # ring has lost a key of the window before it (schedule/prefix.h)
        shorter = [ring - window + 1 for ring, window in rings if window and ring < context]
        count, ring = len(self.kv), min(ring for ring, _ in rings)
        return _core.KvShape(context, count, ring, min(shorter, default=context))

    def apply(self, op: _core.KvOp) -> None:
        if op.kind == _core.KvKind.copy:
            self._copy(op.source, op.cache, op.end)

    def of(self, cache: int) -> list[DeviceMemory]:
        return [memory.of(kv) for memory, kv in zip(self.memories, self.kv[cache], strict=True)]

    def _copy(self, source: int, target: int, count: int) -> None:
        g = self.memories[0].geometry
        # of a ring that is shorter, all of it. 4,096 positions of `2b` (252 MB) take 0.1 ms
        # (calculated)
        used = -(-count // g.splits)
        for from_, to in zip(self.of(source), self.of(target), strict=True):
            for layer in range(g.config.num_hidden_layers):
                to.kv_layer(layer)[:, :, :, :used] = from_.kv_layer(layer)[:, :, :, :used]
