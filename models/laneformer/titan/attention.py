"""Attention for training: FlexAttention where a mask would cost SDPA its fast kernels on a GPU.

On CUDA, SDPA's flash kernel takes no mask and its memory-efficient one no grouped KV heads; cuDNN does
not take all shapes, and the math kernel materializes all scores. Compiled FlexAttention is one fused
kernel that skips the blocks a window or a document boundary empties; without compile it materializes
the scores, too. SDPA remains on the CPU and where no mask is needed.

    B batch   S sequence
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ..config import LaneformerConfig
from ..model import LaneAttention
from ..positions import causal_mask
from .products import multiply_fused


class TitanAttention(LaneAttention):
    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return multiply_fused(x, self.wq, self.wk, self.wv)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | BlockMask | None
    ) -> Tensor:
        # a BlockMask chooses FlexAttention
        if not isinstance(mask, BlockMask):
            return super().attend(query, key, value, mask)
        out = flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out


def document_ids(input_ids: Tensor, bos_id: int) -> Tensor:
    """Return the document of each token, int64 (B, S)."""
    # the first document may have begun before the window
    return (input_ids == bos_id).cumsum(1)


def training_masks(
    config: LaneformerConfig, input_ids: Tensor, kind: str, documents: Tensor | None
) -> list[Tensor | BlockMask | None]:
    """Return one mask a layer, None for plain causality; the head for drafts counts as a layer.

    Args:
        documents: (B, S); no token sees another document's.
    """
    layers = range(config.num_hidden_layers + config.num_nextn_predict_layers)
    seq_len, device = input_ids.shape[1], input_ids.device

    def mask(window: int | None) -> Tensor | BlockMask | None:
        window = None if window is None or window >= seq_len else window
        if window is None and documents is None:
            return None
        if kind == "flex":
            if documents is None:
                return _plain_blocks(window, seq_len, device)
            return document_blocks(documents, window)
        positions = torch.arange(seq_len, device=device)
        visible = causal_mask(positions, positions, window)
        if documents is None:
            return visible
        return visible & (documents[:, None, :, None] == documents[:, None, None, :])

    by_window = {window: mask(window) for window in {config.window(i) for i in layers}}
    return [by_window[config.window(i)] for i in layers]


def _causal(window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) if window is None else (query >= key) & (query - key < window)

    return sees


@functools.cache
def _block_mask_builder(device_type: str) -> Callable[..., BlockMask]:
    # uncompiled it writes several tensors (B, 1, S, S), of 8 bytes an element, in between
    return create_block_mask if device_type == "cpu" else torch.compile(create_block_mask)


@functools.cache  # the same for every batch
def _plain_blocks(window: int | None, seq_len: int, device: torch.device) -> BlockMask:
    return create_block_mask(_causal(window), None, None, seq_len, seq_len, device=device)


def document_blocks(documents: Tensor, window: int | None = None, step: int = 1) -> BlockMask:
    """Return the mask of causal attention within documents (B, S) for FlexAttention: (S, S).

    Args:
        step: Of drafts, whose keys follow those of earlier steps (`mtp.draft_mask`): (S, step S).
    """
    causal = _causal(window)
    size, length = documents.shape

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible, place = causal(batch, head, query, key), key
        if step > 1:
            place = key % length
            visible = visible | ((key >= length) & (place == query))
        return visible & (documents[batch, query] == documents[batch, place])

    build = _block_mask_builder(documents.device.type)
    return build(sees, size, None, length, step * length, device=documents.device)
