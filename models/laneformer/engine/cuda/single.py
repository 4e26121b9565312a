"""`Passes` of one sequence at a time, by the kernels of sequence.py: where tiles do not fit, or are not asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .caches import Caches
from .executor import Look
from .memory import Column
from .prefill import DeviceCache, read
from .sequence import IN_KERNEL_TOKENS, SequenceDecoder

LAUNCH_TOKENS = 16  # that one launch makes, so that a request which is told to leave ends soon


class SinglePasses:
    """The columns of a pass are positions of one sequence, which the kernel reads one after the other: it gives the
    last one's token alone, so there are no drafts.
    """

    columns, sequences, unread, ahead = IN_KERNEL_TOKENS, 1, IN_KERNEL_TOKENS, LAUNCH_TOKENS - 1

    def __init__(self, decoder: SequenceDecoder):
        self.decoder, self.config = decoder, decoder.config
        self.caches = Caches(decoder.memories, decoder.slots.most)

    def read(self, ids: Sequence[int], cache: int, position: int, first_row: int) -> Iterator[torch.Tensor]:
        self.decoder.settle()
        return read(self.decoder.model, ids, DeviceCache(self.caches.of(cache), position), first_row)

    def run(
        self,
        columns: Sequence[Column],
        ahead: int = 0,
        logits: torch.Tensor | None = None,
        look: Look | None = None,
    ) -> list[list[int]]:
        first, last, decoder = columns[0], columns[-1], self.decoder
        decoder.settle()
        for memory, kv in zip(decoder.memories, self.caches.kv[first.sequence], strict=True):
            memory.kv = kv
        ids = [0] * first.position + [column.token for column in columns]  # those before are not read again
        stops = last.stops[: last.stop_count]
        decoder.launch(ids, first.position, 1 + ahead, stops, last.sampling, logits)
        tokens = decoder.wait()
        decoder.slots.holds([])  # nobody starts from what these caches have
        tokens += tokens[-1:] * decoder.surplus
        return [[token] * len(columns) for token in tokens]
