"""The training layer whose joins and norms are the Triton kernels of join_norm.py.

B batch   S sequence   L lanes   D hidden
"""

from __future__ import annotations

import math

from torch import Tensor

from ..cache import Cache
from ..joins import Join
from ..lanes import LaneRMSNorm
from .join_norm import JoinNorm
from .layer import TitanLayer


class FusedLayer(TitanLayer):
    """The same mathematics in five parts: norm, attention, join with norm, MLP, join.

    `JoinNorm` gives back the streams and the partial output; later parts have to use those.
    """

    def forward(
        self,
        h: Tensor,
        delayed: tuple[Tensor | None, Tensor | None],
        cos_sin: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
        norm = self.attention_norm
        h, x, _ = JoinNorm.apply(_wide(h, norm), None, None, norm.weight, norm.eps, False)
        partial = self.attention(x, cos_sin, mask, cache)
        h, x, attention = self.join(0, h, partial, delayed[0], self.ffn_norm)
        h, _, mlp = self.join(1, h, self.feed_forward(x), delayed[1], None)
        return h, (attention, mlp)

    def join(
        self,
        module: int,
        h: Tensor,
        partial: Tensor,
        delayed: Tensor | None,
        norm: LaneRMSNorm | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return streams, normed streams, and the partial if it is sent to the other lanes."""
        # the kernels know Join.PAST only: other joins become a term to add
        join, sends = self.joins[module], self.sends[module]
        term = partial
        if join == Join.PRESENT and partial.shape[2] > 1:
            term = partial.sum(2, keepdim=True)
        if join == Join.NO_REDUCE:
            term = math.sqrt(partial.shape[2]) * partial
        lanes = max(h.shape[2], term.shape[2])
        h = _wide(h.expand(-1, -1, lanes, -1), norm)
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        h, x, returned_partial = JoinNorm.apply(
            h, term.expand_as(h), delayed, weight, eps, sends and join == Join.PAST
        )
        return h, x, partial if sends and join != Join.PAST else returned_partial


def _wide(h: Tensor, norm: LaneRMSNorm | None) -> Tensor:
    """Repeat one stream that stands for all lanes, where the lanes' scales differ."""
    return (
        h.expand(-1, -1, len(norm.weight), -1) if norm is not None and norm.weight.dim() == 2 else h
    )
