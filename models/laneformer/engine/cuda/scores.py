"""Log-probabilities of tokens from logits on a GPU, kept as they come (schedule/sequence.h: Scores)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..decoder import Scores


class KeptScores:
    """Of the tokens of one sequence: log p, the `top` likeliest ids and their log p."""

    def __init__(self, top: int):
        self.top = top
        self._parts: list[Scores] = []

    def add(self, logits: torch.Tensor, targets: Sequence[int]) -> None:
        """Logits (n, V) from which these n tokens follow."""
        logprobs, ids, top_logprobs = scores_of(logits, list(targets), self.top)
        self._parts.append((logprobs.numpy(), ids.numpy(), top_logprobs.numpy()))

    def part(self, first: int, count: int) -> Scores:
        """Of tokens first, ..., first + count - 1."""
        empty = tuple(np.empty(0, dtype) for dtype in (np.float32, np.int32, np.float32))
        logprobs, ids, top_logprobs = (
            np.concatenate(values) for values in zip(empty, *self._parts, strict=True)
        )
        last = first + count
        flat = slice(self.top * first, self.top * last)
        return logprobs[first:last], ids[flat], top_logprobs[flat]


def scores_of(
    logits: torch.Tensor, targets: list[int], top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of logits (n, V): log p of the targets (n,), the `top` likeliest ids and their log p, flat; on the CPU."""
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(targets, device=logits.device)[:, None])[:, 0]
    # a stable sort puts the lowest of equally likely ids first, which topk does not promise
    likeliest = (
        logits.sort(dim=-1, descending=True, stable=True).indices[:, :top]
        if top
        else own[:, None][:, :0].long()
    )
    return own.cpu(), likeliest.flatten().int().cpu(), logprobs.gather(1, likeliest).flatten().cpu()
