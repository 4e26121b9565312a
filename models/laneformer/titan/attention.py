"""Attention for training: FlexAttention on a GPU, where a window or document mask would cost
SDPA its fast kernels.

On CUDA, SDPA's flash kernel takes no mask and its memory-efficient one no grouped KV heads; what is left
is cuDNN, where it accepts the shapes, or the math kernel, which materializes all scores. FlexAttention
skips the blocks that a window or a document boundary empties and has one fused kernel, if it is
compiled; without compile it materializes the scores, too. On the CPU, and where no mask is needed, it is
SDPA as in the plain model.

FlexAttention pads heads of 96 to 128. Flash attention for sequences of varying length ("varlen") does
not, and knows windows and documents as well: its sequences are the documents. Not the default:
untested without a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from ..config import LaneformerConfig
from ..model import LaneAttention
from ..positions import causal_mask
from .private_torch import varies
from .products import one_product


class Segments(NamedTuple):
    """Where the documents of a batch, laid end to end, begin and end: int32 (their number + 1,);
    no longer than S.
    """

    ends: Tensor
    window: int | None


class TitanAttention(LaneAttention):
    """The model's attention; the kind of mask decides: a BlockMask, Segments, or what SDPA takes."""

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return one_product(x, self.wq, self.wk, self.wv)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | BlockMask | Segments | None
    ) -> Tensor:
        if isinstance(mask, BlockMask):
            out = flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
            assert isinstance(out, Tensor)
            return out
        if isinstance(mask, Segments):
            size, _, seq_len, _ = query.shape
            q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # (B S, heads, d)
            before = -1 if mask.window is None else mask.window - 1  # keys in front of the query's own
            ends = mask.ends
            rows = varlen_attn(
                q, k, v, ends, ends, seq_len, seq_len, window_size=(before, 0), enable_gqa=True
            )
            assert isinstance(rows, Tensor)
            return rows.unflatten(0, (size, seq_len)).transpose(1, 2)
        return super().attend(query, key, value, mask)


def document_ids(input_ids: Tensor, bos_id: int) -> Tensor:
    """Which document of its sequence a token belongs to, int64 (B, S); a first one may have
    begun before the window.
    """
    return (input_ids == bos_id).cumsum(1)


def training_masks(
    config: LaneformerConfig, input_ids: Tensor, kind: str, documents: Tensor | None
) -> list[Tensor | BlockMask | Segments | None]:
    """One mask a layer, None for plain causality; with `documents` (B, S) no token sees another document's.

    The head for multi-token prediction counts as a layer.
    """
    layers = range(config.num_hidden_layers + config.num_nextn_predict_layers)
    seq_len, device = input_ids.shape[1], input_ids.device
    ends = segment_ends(input_ids, documents) if kind == "varlen" else None

    def mask(window: int | None) -> Tensor | BlockMask | Segments | None:
        window = None if window is None or window >= seq_len else window
        if window is None and documents is None:
            return None
        if ends is not None:
            return Segments(ends, window)
        if kind == "flex":
            return (
                _plain_block_mask(window, seq_len, device)
                if documents is None
                else _blocks(window, documents)
            )
        positions = torch.arange(seq_len, device=device)
        seen = causal_mask(positions, positions, window)
        return (
            seen if documents is None else seen & (documents[:, None, :, None] == documents[:, None, None, :])
        )

    by_window = {window: mask(window) for window in {config.window(i) for i in layers}}
    return [by_window[config.window(i)] for i in layers]


def segment_ends(input_ids: Tensor, documents: Tensor | None) -> Tensor:
    """Where sequences (B, S), or with `documents` (B, S) the documents in them, begin and end in one
    row of B S.
    """
    size, seq_len = input_ids.shape
    if documents is None:
        return torch.arange(0, size * seq_len + 1, seq_len, dtype=torch.int32, device=input_ids.device)
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    begins = first.flatten().nonzero()[:, 0]
    ends = torch.cat((begins, begins.new_full((1,), size * seq_len))).int()
    varies(ends, 0)  # how many documents there are must not compile the layers again
    return ends


def _causal(window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) if window is None else (query >= key) & (query - key < window)

    return sees


@functools.cache
def _block_mask_builder(device_type: str) -> Callable[..., BlockMask]:
    """Compiled on a GPU: as it stands it writes several tensors (B, 1, S, S), of 8 bytes
    an element, in between.
    """
    return create_block_mask if device_type == "cpu" else torch.compile(create_block_mask)


@functools.cache  # the same for every batch
def _plain_block_mask(window: int | None, seq_len: int, device: torch.device) -> BlockMask:
    return create_block_mask(_causal(window), None, None, seq_len, seq_len, device=device)


def draft_blocks(documents: Tensor, step: int) -> BlockMask:
    """`positions.draft_mask` within documents (B, S), for FlexAttention: (S, k S)."""
    size, length = documents.shape

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        column = (key <= query) | ((key >= length) & (key % length == query))
        return column & (documents[batch, query] == documents[batch, key % length])

    build = _block_mask_builder(documents.device.type)
    return build(sees, size, None, length, step * length, device=documents.device)


def _blocks(window: int | None, documents: Tensor) -> BlockMask:
    causal = _causal(window)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return causal(batch, head, query, key) & (documents[batch, query] == documents[batch, key])

    size, seq_len = documents.shape
    build = _block_mask_builder(documents.device.type)
    return build(sees, size, None, seq_len, seq_len, device=documents.device)
