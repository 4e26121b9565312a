"""Several sequences side by side, and several positions of one: passes of up to 8 columns (passes.cu).

A launch is one pass; between two of them the host says what the columns are. As in the CPU engine
(schedule/schedule.cpp): first the next id of each sequence that decodes, and draft tokens after it; then as many
ids of prompts as there is room for. Each sequence draws the tokens that it would draw alone, whatever shares
its passes. Long prompts are read by PyTorch, a piece between two passes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch

from ..decoder import RequestFailed
from .decoding import Decoding
from .launches import PassKernel
from .memory import Column, DeviceMemory
from .prefill import DeviceCache, logits_of, streams
from .slots import Slots
from .tape_model import TapeModel

MIN_AWAITED = 16  # positions: who shares as many with a prompt that is being read begins when these are there


class PassDecoder(PassKernel):
    """Weights as tiles on the GPUs, and passes over them. After a hang its error says who waited for what."""

    def _hold(self, memories: list[DeviceMemory]) -> None:
        super()._hold(memories)
        self.slots = Slots(memories, 0)

    @functools.cached_property
    def tape_model(self) -> TapeModel:
        """The PyTorch model on the tiles, for long prompts and scores; made when it is first needed."""
        return TapeModel(self.memories)

    def advance(self, sequences: Sequence[Decoding]) -> None:
        """End and begin sequences, read a piece of a prompt, then one pass: a token or more
        for each that decodes.

        As many run as there are columns; further ones wait. What fails is in `error` of
        those whom it concerns.
        """
        self._begin(sequences)
        try:
            running = [s for s in sequences if s.slot]
            if reading := next((s for s in running if s.reads_pieces), None):
                self._read_piece(reading)
            self._pass([s for s in running if not (s.reads_pieces or s.finished)])
        finally:
            self._end(sequences)

    def _begin(self, sequences: Sequence[Decoding]) -> None:
        for s in sequences:
            s.finished = s.finished or s.left
        self._end(sequences)
        running = [s for s in sequences if s.slot]
        for s in sequences:
            if s.finished or s.slot or len(running) == self.geometry.mma_columns or self._awaits(s, running):
                continue
            for other in running:
                self.slots.holds(other.ids[: other.position], slot=other.slot)
            slot, start = self.slots.choose(s.ids, s.max_reusable, s.request.reuse_prefix)
            slot.running = True
            s.begin(slot, start)
            for memory in self.memories:
                memory.changes(s.request, s.ids, 0, slot.number)
            running.append(s)

    def _awaits(self, s: Decoding, running: Sequence[Decoding]) -> bool:
        """Others read what it would read, too."""
        reading = (r for r in running if r.position < r.prompt_length - 1)
        return any(s.shares(r) - r.position >= MIN_AWAITED for r in reading)

    def _end(self, sequences: Sequence[Decoding]) -> None:
        """Slots of those that have finished are for others, who may go on from there."""
        for s in sequences:
            if s.finished and s.slot:
                s.slot.running = False
                self.slots.holds(s.ids[: s.position] if s.error is None else [], slot=s.slot)
                s.slot = None

    def _read_piece(self, s: Decoding) -> None:
        assert s.slot is not None
        ids, first = s.piece(), max(s.position, s.first_scored())
        cache = DeviceCache(
            [memory.of(kv) for memory, kv in zip(self.memories, s.slot.kv, strict=True)], s.position
        )
        try:
            for h in streams(self.tape_model, ids, cache):
                if s.scoring and (rows := s.position + len(ids) - first) > 0:
                    s.score(first, logits_of(self.tape_model, h[:, -rows:]))
        except torch.OutOfMemoryError as error:
            s.fail(f"the GPU has no memory for this request: {error}")
            return
        s.was_read(len(ids))
        s.slot.written = max(s.slot.written, s.position)
        self.passes += 1

    def _pass(self, sequences: Sequence[Decoding]) -> None:
        room, columns, parts = self.geometry.mma_columns, list[Column](), list[tuple[Decoding, int]]()
        share = room // max(1, len(sequences))  # drafts leave columns for prompts
        for s in sorted(sequences, key=lambda s: not s.decodes):
            new = s.columns(min(share, room - len(columns)) if s.decodes else room - len(columns))
            columns += new
            parts += [(s, len(new))] if new else []
        if not columns:
            return
        scored = any(s.request.logprobs is not None for s, _ in parts)
        try:
            chosen = self.run(columns, self._logits if scored else None)
        except RequestFailed as error:
            for s, _ in parts:
                s.fail(str(error))
            return
        first = 0
        for s, count in parts:
            self._take(
                s, chosen[first : first + count], self._logits[first : first + count] if scored else None
            )
            first += count

    def _take(self, s: Decoding, chosen: list[int], logits: torch.Tensor | None) -> None:
        begins, new = not s.made, s.take(chosen, logits)
        assert s.slot is not None
        if begins and new:
            self.slots.keep(s.ids[: s.prompt_length], s.prompt_length + s.max_tokens - 1, s.slot)
        if s.penalises:
            for token, memory in itertools.product(set(new), self.memories):
                memory.times[s.slot.number, token] = s.tokens.count(token)

    @functools.cached_property
    def _logits(self) -> torch.Tensor:
        shape = self.geometry.mma_columns, self.config.vocab_size
        return torch.empty(shape, dtype=torch.float32, device=self.memories[0].device)
