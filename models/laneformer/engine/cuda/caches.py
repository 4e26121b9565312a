"""Keys and values of sequences in device memory: where the schedule's KvOps are carried out.

A layer with a sliding window has a ring that overwrites, so a sequence can start wherever no ring has lost a key of
the window before it; the schedule goes by two numbers of the rings (schedule/prefix.h). A copy of `2b`'s 4,096
positions (252 MB) is calculated as 0.1 ms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..cpu import _core
from .memory import DeviceMemory

MAX_CACHES = 64


class Caches:
    """As many as `memory.kv` is of; or `most`, while there is memory."""

    def __init__(self, memories: Sequence[DeviceMemory], most: int = 0):
        self.memories = memories
        one = memories[0].geometry.lanes_per_device * memories[0].geometry.kv_lane
        parts = zip(*(memory.kv.split(one) for memory in memories), strict=True)
        self.kv = dict(enumerate(list(kv) for kv in parts))  # of each cache: of each device
        self.most, self._fixed = max(most, len(self.kv)), most <= len(self.kv)
        self._spare: list[list[torch.Tensor]] = []

    def shape(self) -> _core.KvShape:
        g = self.memories[0].geometry
        context, layers = g.config.max_position_embeddings, range(g.config.num_hidden_layers)
        rings = [(g.splits * g.kv_slots(i), g.config.window(i)) for i in layers]
        shorter = [ring - window + 1 for ring, window in rings if window and ring < context]
        return _core.KvShape(
            context, self.most, min(ring for ring, _ in rings), min(shorter, default=context)
        )

    def apply(self, op: _core.KvOp) -> None:
        """torch.OutOfMemoryError where there is none for another cache. Memory of closed ones is kept for others."""
        if op.kind == _core.KvKind.close and not self._fixed:
            self._spare.append(self.kv.pop(op.cache))
        if op.kind == _core.KvKind.open and op.cache not in self.kv:
            new = (
                self._spare.pop()
                if self._spare
                else [torch.zeros_like(memory.kv) for memory in self.memories]
            )
            self.kv[op.cache] = new
        if op.kind == _core.KvKind.copy:
            self._copy(op.source, op.cache, op.end)

    def of(self, cache: int) -> list[DeviceMemory]:
        """The devices' memory, with this cache's keys and values in the place of all."""
        return [memory.of(kv) for memory, kv in zip(self.memories, self.kv[cache], strict=True)]

    def _copy(self, source: int, target: int, count: int) -> None:
        """The first `count` positions; of a ring that is shorter, all of it."""
        for memory, here, there in zip(self.memories, self.kv[source], self.kv[target], strict=True):
            g = memory.geometry
            used = -(-count // g.splits)
            for layer in range(g.config.num_hidden_layers):
                memory.kv_layer(layer, there)[:, :, :, :used] = memory.kv_layer(layer, here)[:, :, :, :used]
