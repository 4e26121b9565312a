"""The training layer on the kernels of join_norm.py."""

from __future__ import annotations

from torch import Tensor

from ..config import Join
from ..model import Cache, LaneRMSNorm
from .join_norm import ALONE, JoinNorm
from .layer import TitanLayer


class FusedLayer(TitanLayer):
    """The same mathematics in five parts: norm, attention, join with norm, MLP, join.

    `JoinNorm` gives back the streams and the partial output; later parts have to use those.
    """

    def forward(
        self,
        h: Tensor,
        delayed: tuple[Tensor | None, Tensor | None],
        rope: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
        norm = self.attention_norm
        h, x, _ = JoinNorm.apply(_wide(h, norm), None, None, norm.weight, ALONE, norm.eps, False)
        partial = self.attention(x, rope, mask, cache)
        h, x, attention = self._join(0, h, partial, delayed[0], self.ffn_norm)
        h, _, mlp = self._join(1, h, self.feed_forward(x), delayed[1], None)
        return h, (attention, mlp)

    def _join(
        self, module: int, h: Tensor, partial: Tensor, delayed: Tensor | None, norm: LaneRMSNorm | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Streams, the same normed, and the partial if it is to be broadcast."""
        how, broadcast = self.joins[module], self.broadcasts[module]
        passed = None
        if h.shape[2] != partial.shape[2] and how == Join.PRESENT:  # equal streams stay one
            passed, partial, broadcast = partial if broadcast else None, partial.sum(2, keepdim=True), False
        h = _wide(h.expand(-1, -1, partial.shape[2], -1), norm)
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        h, x, handed_on = JoinNorm.apply(h, partial, delayed, weight, how.code, eps, broadcast)
        return h, x, handed_on if passed is None else passed


def _wide(h: Tensor, norm: LaneRMSNorm | None) -> Tensor:
    """One stream that stands for all lanes, repeated where the lanes' scales differ."""
    return h.expand(-1, -1, len(norm.weight), -1) if norm is not None and norm.weight.dim() == 2 else h
