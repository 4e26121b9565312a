"""One sequence on its way through passes (passes.py): what it reads, drafts,
draws and keeps (schedule/sequence.h).

The first ids of a long prompt, and all that is to be scored, are read in pieces by PyTorch; where
the pieces end is a matter of the prompt and of what was reused, never of the others. All further ids
are columns of passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from ..decoder import Request
from .memory import Changes, Column
from .scores import KeptScores
from .slots import Slot

PIECE_TOKENS = (
    1024  # the others wait for a piece: 10 ms for the weights of `2b` and 9 for these, both calculated
)
IN_PASS_TOKENS = (
    64  # so many ids at most are read by passes alone: eight passes take as long as a small piece
)
LONGEST_PHRASE, SHORTEST_PHRASE = 4, 2  # ids that must agree before what followed them is drafted
NEUTRAL = (1.0, 0.0, 0.0)  # penalties


class Decoding:
    """One sequence of a request. `position`: ids before it have their keys and values in `slot`."""

    def __init__(self, request: Request, context: int = 2**31):
        """`context`: positions that a cache has."""
        self.request, self.ids = request, list(request.prompt)
        self.prompt_length = len(self.ids)
        room = context - self.prompt_length + 1
        self.max_tokens = 0 if self.scoring else min(request.max_new_tokens, room)
        self.slot: Slot | None = None
        self.position = self.pieces_end = 0
        self.finished = self.max_tokens == 0 and not self._scored_ids()
        self.left = False  # it ends before the next pass
        self.error: str | None = None
        self.drafts: list[int] = []
        self.run = 0  # known ids in the pass under way; the drafts come after them
        self.reused = self.passes = self.proposed = self.accepted = 0
        self.scores = KeptScores(request.logprobs or 0)
        self.logits: list[torch.Tensor] = []  # with keep_logits

    @property
    def scoring(self) -> bool:
        return self.request.score_from > 0

    @property
    def tokens(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def made(self) -> int:
        """New tokens."""
        return len(self.ids) - self.prompt_length

    @property
    def decodes(self) -> bool:
        return not self.scoring and self.position + 1 == len(self.ids)

    @property
    def reads_pieces(self) -> bool:
        return self.position < self.pieces_end

    @property
    def penalises(self) -> bool:
        r = self.request
        return (r.repetition_penalty, r.frequency_penalty, r.presence_penalty) != NEUTRAL

    @property
    def max_reusable(self) -> int:
        """Positions that need not be read if they are in a cache."""
        if not self.request.reuse_prefix or self.request.keep_logits:
            return 0
        return (self.request.score_from if self.scoring else self.prompt_length) - 1

    def begin(self, slot: Slot, start: int) -> None:
        """In a slot that has the first `start` ids."""
        self.slot, self.position, self.reused = slot, start, start
        if self.scoring:
            self.pieces_end = len(self._scored_ids())
        elif self.prompt_length - start > IN_PASS_TOKENS:
            self.pieces_end = self.prompt_length - 1

    def fail(self, error: str) -> None:
        self.error, self.finished = error, True

    def piece(self) -> list[int]:
        """The next ids that PyTorch reads."""
        return self.ids[self.position : min(self.pieces_end, self.position + PIECE_TOKENS)]

    def score(self, first: int, blocks: Iterable[torch.Tensor]) -> None:
        """Of what a scoring request has read: the logits from position `first` on."""
        for logits in blocks:
            if self.request.keep_logits:
                self.logits.append(logits.cpu())
            else:
                self.scores.add(logits, self.ids[first + 1 : first + 1 + len(logits)])
            first += len(logits)

    def first_scored(self) -> int:
        """The position from which logits are wanted."""
        return 0 if self.request.keep_logits else self.request.score_from - 1

    def was_read(self, count: int) -> None:
        """A piece of so many ids."""
        self.position += count
        self.passes += 1
        self.finished = self.finished or (self.scoring and not self.reads_pieces)

    def columns(self, most: int) -> list[Column]:
        """The next pass's columns, at most `most`."""
        self.run = min(len(self.ids) - self.position, most)
        left = self.prompt_length + self.max_tokens - len(self.ids) - 1
        draws = self.run > 0 and self.position + self.run == len(self.ids)
        self.drafts = draft(self.ids, min(self.request.speculate, most - self.run, left)) if draws else []
        self.proposed += len(self.drafts)
        new = self.ids[self.position : self.position + self.run] + self.drafts
        self.passes += bool(new)
        return [self._column(i, token) for i, token in enumerate(new)]

    def _column(self, i: int, token: int) -> Column:
        r, drafts = self.request, max(0, i + 1 - self.run)
        assert self.slot is not None
        row = self.slot.number
        left = max(r.min_new_tokens - self.made - drafts, 0)
        return Column(
            token, self.position + i, row, drafts, row if self.penalises else -1, row if r.logit_bias else -1,
            len(r.stop_ids), tuple(r.stop_ids), r.sampling,
            Changes(None, None, r.repetition_penalty, r.frequency_penalty, r.presence_penalty, left),
        )  # fmt: skip

    def take(self, chosen: Sequence[int], logits: torch.Tensor | None) -> list[int]:
        """What each of those columns would be followed by, from `logits` (columns, V); the new tokens.

        One token, and one more for each draft that was right.
        """
        assert self.slot is not None
        self.slot.written = max(self.slot.written, self.position + len(chosen))
        self.position += self.run
        known = len(self.ids)
        for i, token in enumerate(chosen[self.run - 1 :] if self.position == known else ()):
            self.ids.append(token)
            right = self.drafts[i : i + 1] == [token]
            self.accepted += right
            ended = token in self.request.stop_ids or self.made == self.max_tokens
            if ended or not right:
                break
            self.position += 1  # the draft's keys and values stand
        new = self.ids[known:]
        if new and self.request.logprobs is not None and logits is not None:
            self.scores.add(logits[self.run - 1 :][: len(new)], new)
        self.finished = bool(new) and ended
        return new

    def shares(self, other: Decoding) -> int:
        """How many of the ids that it could reuse are the first of the other's prompt."""
        most = min(self.max_reusable, other.prompt_length)
        differs = np.flatnonzero(np.array(self.ids[:most]) != np.array(other.ids[:most]))
        return int(differs[0]) if len(differs) else most

    def statistics(self) -> dict[str, int]:
        return {
            "reused_tokens": self.reused, "passes": self.passes, "proposed_tokens": self.proposed,
            "accepted_tokens": self.accepted,
        }  # fmt: skip

    def _scored_ids(self) -> list[int]:
        """Positions that a scoring request reads: the last id is only predicted."""
        return self.ids if self.request.keep_logits else self.ids[:-1] if self.scoring else []


def draft(ids: Sequence[int], most: int) -> list[int]:
    """Prompt lookup: `most` ids that followed the latest earlier place of the last
    few ids (as schedule/lookup.cpp).
    """
    length = len(ids)
    for phrase in range(LONGEST_PHRASE, SHORTEST_PHRASE - 1, -1) if most > 0 else ():
        last = list(ids[length - phrase :])
        for end in range(length - 1, phrase - 1, -1):
            if list(ids[end - phrase : end]) == last:
                drafts: list[int] = []
                for i in range(most):  # a repetition may continue into its own drafts
                    drafts.append(ids[end + i] if end + i < length else drafts[end + i - length])
                return drafts
    return []
