"""The models that are compared: joins of one update table, on the same modules with the same initial weights.

Most variants are switches of `LaneformerConfig`. The neighbours below need another order of joining; their
modules are those of a Laneformer with delay 0, so a seed gives all of them the same parameters. p_l is lane
l's partial output of a module, P the sum over lanes, h_l lane l's stream.

  ladder       every module reads the stream without the output of the module before it (Ladder Residual,
               arXiv 2501.06589): h += P one module late
  parallel     attention and MLP of a layer read the same stream; one sum a layer (GPT-J, PaLM)
  desync_k     only every k-th module sums over lanes, and makes the streams equal: h_l = mean(h) + P; the others join
               as NO_REDUCE does, h_l += sqrt(L) p_l (Desync Residual, of the same paper)
  lost_k       planted faults, which the comparison must find: the outputs of lanes 0 to k - 1 never join
"""

from __future__ import annotations

import math
import re
from typing import cast

import torch
from torch import Tensor

from laneformer import Laneformer, LaneformerConfig
from laneformer.model import LaneformerLayer, rope_table


class NeighbourModel(Laneformer):
    """A model whose joins no config describes; `kind` is one of the list above."""

    def __init__(self, config: LaneformerConfig, kind: str):
        if config.broadcast_delay:
            raise ValueError(f"variant {kind!r} has joins of its own: leave broadcast_delay at 0")
        super().__init__(config)
        self.kind, _, count = kind.partition("_")
        self.count = int(count or 0)

    def forward(self, input_ids: Tensor, cache: object = None) -> Tensor:
        """Token ids (B, S) -> logits (B, S, V)."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        rope, masks = rope_table(self.config, positions), self.masks(positions, positions)
        h = self.tok_embeddings(input_ids)[:, :, None].expand(-1, -1, self.config.num_lanes, -1)
        pending = torch.zeros_like(h[:, :, :1])  # ladder: the last module's sum
        layers = cast("list[LaneformerLayer]", list(self.layers))
        for i, (layer, mask) in enumerate(zip(layers, masks, strict=True)):
            attention = layer.attention(layer.attention_norm(h), rope, mask, None)
            if self.kind == "parallel":
                h = h + (attention + layer.feed_forward(layer.ffn_norm(h))).sum(2, keepdim=True)
                continue
            h, pending = self.joined(h, 2 * i, attention, pending)
            h, pending = self.joined(h, 2 * i + 1, layer.feed_forward(layer.ffn_norm(h)), pending)
        return self.lm_head(h + pending, self.norm, self.tok_embeddings.weight)

    def joined(self, h: Tensor, module: int, partial: Tensor, pending: Tensor) -> tuple[Tensor, Tensor]:
        """The streams that the next module reads, and what joins them after it."""
        if self.kind == "ladder":
            return h + pending, partial.sum(2, keepdim=True)
        if self.kind == "lost":
            return h + partial[:, :, self.count :].sum(2, keepdim=True), pending
        if (module + 1) % self.count:
            return h + math.sqrt(partial.shape[2]) * partial, pending
        return (h.mean(2, keepdim=True) + partial.sum(2, keepdim=True)).expand_as(h), pending


def build(config: LaneformerConfig, kind: str | None, seed: int) -> Laneformer:
    """A model with the seed's weights: `kind` None is what the config says. ValueError for an unknown kind."""
    if kind is not None and not re.fullmatch(r"ladder|parallel|desync_[1-9]\d*|lost_[1-9]\d*", kind):
        raise ValueError(f"joins = {kind!r} is unknown; choose from ladder, parallel, desync_<k>, lost_<k>")
    model = Laneformer(config) if kind is None else NeighbourModel(config, kind)
    model.init_weights(seed)
    return model
