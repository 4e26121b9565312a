"""Drafts of the multi-token-prediction head by the plain model."""

from __future__ import annotations

import torch
from torch import Tensor

from laneformer import Laneformer
from laneformer.model import deliver, run_layers
from laneformer.mtp import draft_mask


def draft_logits(model: Laneformer, input_ids: Tensor, steps: int = 1) -> list[Tensor]:
    """Return step k's logits (B, S - k, V) for token ids (B, S), over the whole vocabulary."""
    # logits at t score token t+k+1, given the tokens up to t+k; `draft_vocab_size` does not matter
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    embedding, masks = model.tok_embeddings(input_ids), model.masks(positions, positions)
    h, tail = run_layers(model.layers, model.config, embedding, model.rope(positions), masks)
    ropes = [model.rope(positions + step) for step in range(steps)]
    visible = [draft_mask(len(positions), step, input_ids.device) for step in range(1, steps + 1)]
    assert model.mtp is not None, "the model has no head that drafts"
    assert model.lm_head.weight is not None, "a tied head does not draft"
    outputs = model.mtp(deliver(h, tail, model.config), embedding, ropes, visible)
    return [model.lm_head.score(x[:, :-k], model.lm_head.weight) for k, x in enumerate(outputs, 1)]
