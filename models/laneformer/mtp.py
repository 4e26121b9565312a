"""Multi-token prediction: a head that drafts the tokens after the next one.

B batch   S positions   L lanes   D hidden
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .cache import KVCache
from .config import DRAFT_IDS, LaneformerConfig
from .lanes import LaneRMSNorm


class MTPHead(nn.Module):
    """Drafts from the streams after the last layer, by a layer of its own whose lanes wait for each other.

    The layer's input is the sum of gated streams and gated embedding; the gates are the scales of two norms. Step
    1, at position t, takes the delivered streams of t and token t+1, and predicts token t+2. Step k takes step
    k-1's output and token t+k, and predicts token t+k+1; it stands at position t+k-1, behind step 1's keys up to
    t and those of the steps between, as when tokens are drafted.
    """

    draft_ids: Tensor

    def __init__(self, config: LaneformerConfig, layer: Any):
        super().__init__()
        self.hidden_norm, self.embedding_norm = LaneRMSNorm(config), LaneRMSNorm(config)
        self.layer = layer
        self.norm = LaneRMSNorm(config)
        if config.draft_vocab_size:
            ids = torch.arange(config.draft_vocab_size, dtype=torch.int32)
            self.register_buffer(DRAFT_IDS.split(".")[1], ids)

    def forward(
        self,
        h: Tensor,
        embedding: Tensor,
        ropes: Sequence[tuple[Tensor, Tensor]],
        masks: Sequence[Tensor | None],
    ) -> list[Tensor]:
        """Delivered streams (B, S, 1 or L, D) and the tokens' embeddings (B, S, D) -> the steps' outputs,
        normed, each (B, S, L, D).

        ropes, masks: one a step, of `draft_mask`. Columns whose token is not known get the first ones':
        the last k of step k mean nothing.
        """
        lanes = self.layer.lanes.here
        cache = KVCache(1 + self.layer.attention.layer) if len(masks) > 1 else None
        outputs = []
        for step, (cos_sin, mask) in enumerate(zip(ropes, masks, strict=True), 1):
            token = embedding.roll(-step, 1)[:, :, None]
            x = self.hidden_norm(h) + self.embedding_norm(token)
            h, _ = self.layer(x, (None, None), cos_sin, mask, cache)
            outputs.append(self.norm(h).expand(-1, -1, lanes, -1))
        return outputs


def draft_mask(length: int, step: int, device: torch.device) -> Tensor:
    """Which keys step k's columns see, bool (S, k S): step 1's up to their own, one of each later step."""
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return torch.cat(
        [causal, *[torch.eye(length, dtype=torch.bool, device=device)] * (step - 1)], 1
    )
