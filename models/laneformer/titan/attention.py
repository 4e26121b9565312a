"""Attention for training: FlexAttention on a GPU, where a window or document mask would cost SDPA its fast kernels.

On CUDA, SDPA's flash kernel takes no mask and its memory-efficient one no grouped KV heads; what is left is cuDNN,
where it accepts the shapes, or the math kernel, which materializes all scores. FlexAttention skips the blocks that a
window or a document boundary empties and has one fused kernel, if it is compiled; without compile it materializes
the scores, too. On the CPU, and where no mask is needed, it is SDPA as in the plain model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ..config import BOS, LaneformerConfig
from ..model import LaneAttention, causal_mask
from .products import one_product

KINDS = ("auto", "sdpa", "flex")


class TitanAttention(LaneAttention):
    """The model's attention; a BlockMask takes it through FlexAttention, anything else through SDPA."""

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return one_product(x, self.wq, self.wk, self.wv)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
        if isinstance(mask, BlockMask):
            out = flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
            assert isinstance(out, Tensor)
            return out
        return super().attend(query, key, value, mask)


def document_ids(input_ids: Tensor) -> Tensor:
    """Which document of its sequence a token belongs to, int64 (B, S); a first one may have begun before the window."""
    return (input_ids == BOS).cumsum(1)


def training_masks(
    config: LaneformerConfig, input_ids: Tensor, kind: str, documents: Tensor | None
) -> list[Tensor | BlockMask | None]:
    """One mask a layer, None for plain causality; with `documents` (B, S) no token sees another document's."""
    seq_len, device = input_ids.shape[1], input_ids.device

    def mask(window: int | None) -> Tensor | BlockMask | None:
        window = None if window is None or window >= seq_len else window
        if window is None and documents is None:
            return None
        if kind == "flex":
            return _plain_block_mask(window, seq_len, device) if documents is None else _blocks(window, documents)
        positions = torch.arange(seq_len, device=device)
        seen = causal_mask(positions, positions, window)
        return seen if documents is None else seen & (documents[:, None, :, None] == documents[:, None, None, :])

    by_window = {window: mask(window) for window in {config.window(i) for i in range(config.num_hidden_layers)}}
    return [by_window[config.window(i)] for i in range(config.num_hidden_layers)]


def _causal(window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) if window is None else (query >= key) & (query - key < window)

    return sees


@functools.cache  # the same for every batch
def _plain_block_mask(window: int | None, seq_len: int, device: torch.device) -> BlockMask:
    return create_block_mask(_causal(window), None, None, seq_len, seq_len, device=device)


def _blocks(window: int | None, documents: Tensor) -> BlockMask:
    causal = _causal(window)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return causal(batch, head, query, key) & (documents[batch, query] == documents[batch, key])

    size, seq_len = documents.shape
    return create_block_mask(sees, size, None, seq_len, seq_len, device=documents.device)
