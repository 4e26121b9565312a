"""Reference logits by one plain pass over all ids: no cache, no batches."""

from __future__ import annotations

import numpy as np
import torch

from evals.scorer import Scores


@torch.no_grad()
def logits_of(
    model: torch.nn.Module, ids: list[int], dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Return logits (len(ids), V) in float64, computed in `dtype`; the model stays in `dtype`."""
    output = model.to(dtype)(torch.tensor([ids]))
    return getattr(output, "logits", output)[0].double()


def scores_of(
    model: torch.nn.Module, ids: list[int], start: int, dtype: torch.dtype = torch.float64
) -> Scores:
    log_p = logits_of(model, ids, dtype)[start - 1 : -1].log_softmax(-1).numpy()
    return Scores(log_p[np.arange(len(log_p)), ids[start:]], log_p.argmax(1) == ids[start:])


def continue_greedily(model: torch.nn.Module, ids: list[int], count: int) -> list[int]:
    """Generate `count` ids, each from the whole prompt again."""
    sequence = list(ids)
    for _ in range(count):
        sequence.append(int(logits_of(model, sequence)[-1].argmax()))
    return sequence[len(ids) :]
