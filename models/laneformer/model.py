"""The Laneformer's mathematics, once: a Transformer whose weights, heads and streams belong to lanes.

Every lane keeps a full-width residual stream and owns a slice of every matrix. A module (attention or MLP)
yields one full-width partial output per lane. With Delayed Tensor Parallelism a lane adds its own partial
at once and the other lanes' partials `broadcast_delay` layers later, so that their exchange never blocks
(see `Join` in joins.py). By default no lane ever adds the other lanes' partials of the last
`broadcast_delay` layers: `JoinRules.delivers` says when they join in the end.

    B batch   S query positions   T key positions   L lanes   D hidden   F intermediate   V vocabulary
    H query heads   K KV heads   d head dimension

The lanes are an axis of ordinary tensors here, so one device computes all of them; the decode engine gives
each lane to its own thread or group of SMs. Read it from the bottom: `Laneformer.forward`, `run_layers`,
`LaneformerLayer`, `join_lanes`. The Hugging Face export carries this file as it is; layers of other families
are in llama/layers.py.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import Cache, KVCache
from .config import LaneformerConfig
from .initialization import init_parameter
from .joins import MODULES, Join
from .lanes import LaneLinear, LaneRMSNorm, Lanes
from .mtp import MTPHead
from .positions import apply_rope, layer_masks, rope_table

# of the last `broadcast_delay` layers, (attention, mlp), as `Lanes.send` gives them; None where nobody waits
Sent: TypeAlias = "tuple[Any | None, Any | None]"
Partials: TypeAlias = "deque[Sent]"


class LaneAttention(nn.Module):
    """Grouped-query attention, head h in lane h // (H/L); a partial output per lane, (B, S, L, D)."""

    def __init__(self, config: LaneformerConfig, layer: int):
        super().__init__()
        lanes, d_model, bias = config.num_lanes, config.hidden_size, config.attention_bias
        kv_size = config.head_dim * config.num_key_value_heads
        self.layer, self.head_dim = layer, config.head_dim
        self.rotates = layer not in config.nope_layers
        self.rope_index, self.num_ropes = config.rope_of(layer), len(config.ropes)
        self.wq = LaneLinear(lanes, d_model, config.query_size, fan="out", bias=bias)
        self.wk = LaneLinear(lanes, d_model, kv_size, fan="out", bias=bias)
        self.wv = LaneLinear(lanes, d_model, kv_size, fan="out", bias=bias)
        self.wo = LaneLinear(lanes, config.query_size, d_model, fan="in")
        self.q_norm = LaneRMSNorm(config, config.head_dim) if config.qk_norm else None
        self.k_norm = LaneRMSNorm(config, config.head_dim) if config.qk_norm else None

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of every lane, (B, S, L, its heads times d)."""
        return self.wq(x), self.wk(x), self.wv(x)

    def heads(self, x: Tensor, norm: LaneRMSNorm | None = None) -> Tensor:
        """(B, S, L, n) -> (B, S, heads, d), each head normed where there is a norm."""
        heads = x.flatten(2).unflatten(-1, (-1, self.head_dim))
        return heads if norm is None else norm(heads)

    def rotate(
        self, query: Tensor, key: Tensor, cos_sin: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys (B, S, heads, d) at their positions; `cos_sin` holds those of all kinds of layers."""
        cos, sin = (table[self.rope_index] if self.num_ropes else table for table in cos_sin)
        return apply_rope(query, (cos, sin)), apply_rope(key, (cos, sin))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Queries (B, H, S, d), keys and values (B, K, T, d) -> (B, H, S, d); causal without a mask."""
        # a branch: compiled for any length, a comparison would be no bool, which `is_causal` has to be
        causal = False if query.shape[2] == 1 else mask is None
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=True
        )

    def forward(
        self, x: Tensor, cos_sin: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        queries, keys, values = self.project(x)
        lanes = values.shape[2]
        query, key = self.heads(queries, self.q_norm), self.heads(keys, self.k_norm)
        value = self.heads(values)
        if self.rotates:
            query, key = self.rotate(query, key, cos_sin)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        out = self.attend(query, key, value, mask)  # (B, H, S, d)
        return self.wo(out.transpose(1, 2).flatten(2).unflatten(-1, (lanes, -1)))


class LaneFeedForward(nn.Module):
    """SwiGLU, w2(silu(w1 x) * w3 x); a partial output per lane, (B, S, L, D)."""

    def __init__(self, config: LaneformerConfig):
        super().__init__()
        lanes, d_model, d_ff = config.num_lanes, config.hidden_size, config.intermediate_size
        self.w1 = LaneLinear(lanes, d_model, d_ff, fan="out")
        self.w2 = LaneLinear(lanes, d_ff, d_model, fan="in")
        self.w3 = LaneLinear(lanes, d_model, d_ff, fan="out")

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Gate and up projection of every lane, (B, S, L, F / L)."""
        return self.w1(x), self.w3(x)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.project(x)
        return self.w2(F.silu(gate) * up)


def join_lanes(
    h: Tensor, partial: Tensor, how: Join, delayed: Any | None, lanes: Lanes | None = None
) -> Tensor:
    """Partial outputs (B, S, L, D) added to the streams h (B, S, L, D), or (B, S, 1, D) while equal.

    `delayed` holds the same module's partials of `broadcast_delay` layers ago, as `lanes` has sent them; of
    those a lane adds all but its own, which it added at once. None where they are known to every lane already.
    """
    lanes = lanes or Lanes(partial.shape[2])
    if how == Join.PRESENT:
        return h + lanes.sum(partial)
    if how == Join.NO_REDUCE:
        return h + math.sqrt(lanes.total) * partial
    h = h + partial
    return h if delayed is None else h + lanes.receive(delayed)


class LaneformerLayer(nn.Module):
    """Attention, then MLP, each joining the streams as the config says for this layer."""

    def __init__(self, config: LaneformerConfig, layer: int):
        super().__init__()
        self.joins = config.join(layer, "attention"), config.join(layer, "mlp")
        attention, mlp = (config.broadcasts(layer, m) or config.delivers(layer, m) for m in MODULES)
        self.sends = attention, mlp
        self.lanes = Lanes(config.num_lanes)
        self.attention_norm: Any = LaneRMSNorm(config)
        self.attention = LaneAttention(config, layer)
        self.ffn_norm: Any = LaneRMSNorm(config)
        self.feed_forward: Any = LaneFeedForward(config)

    def forward(
        self,
        h: Tensor,
        delayed: Sent,
        cos_sin: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Sent]:
        """Streams (B, S, L, D) -> streams, and the partials (attention, mlp) that are sent, else None."""
        attention = self.attention(self.attention_norm(h), cos_sin, mask, cache)
        # sent as soon as it exists: it has `broadcast_delay` layers to arrive
        first = self.lanes.send(attention) if self.sends[0] else None
        h, x = self.join_and_norm(h, attention, self.joins[0], delayed[0], self.ffn_norm)
        mlp = self.feed_forward(x)
        second = self.lanes.send(mlp) if self.sends[1] else None
        return join_lanes(h, mlp, self.joins[1], delayed[1], self.lanes), (first, second)

    def join_and_norm(
        self, h: Tensor, partial: Tensor, how: Join, delayed: Any | None, norm: LaneRMSNorm
    ) -> tuple[Tensor, Tensor]:
        """The streams with `partial` joined, and the same normed: the input of the next module."""
        h = join_lanes(h, partial, how, delayed, self.lanes)
        return h, norm(h)


class LMHead(nn.Module):
    """Streams after the last layer -> logits (B, S, V).

    vocab_parallel: lane l scores its slice of the vocabulary from its own normed stream; weight (L, V/L, D).
    replicate: one ordinary head on the lanes' mean, weight (V, D); `pre_norm_lane_agg`: on the normed sum
    instead. lane: every lane scores the whole vocabulary from its slice of the hidden axis, summed; weight
    (L, V, D/L). Tied, it has no weight of its own: the embedding (V, D) comes with the streams.
    """

    def __init__(self, config: LaneformerConfig):
        super().__init__()
        self.kind, self.shape = config.lm_head_type, config.head_shape
        self.sum_before_norm = config.pre_norm_lane_agg
        self.weight = None if config.tie_word_embeddings else nn.Parameter(torch.empty(self.shape))

    def forward(self, h: Tensor, norm: LaneRMSNorm, embedding: Tensor | None = None) -> Tensor:
        weight = (
            self.weight
            if embedding is None or self.weight is not None
            else embedding.view(self.shape)
        )
        assert weight is not None, "a tied head needs the embedding"
        return self.score(norm(h.sum(2, keepdim=True) if self.sum_before_norm else h), weight)

    def score(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normed streams (B, S, L, D) -> logits (B, S, V)."""
        if self.kind == "vocab_parallel":
            return torch.einsum("bsli,loi->bslo", x, weight).flatten(2)
        if self.kind == "lane":
            owned = x.unflatten(-1, (x.shape[2], -1)).diagonal(dim1=2, dim2=3)  # (B, S, D/L, L)
            return torch.einsum("bsil,loi->bso", owned, weight)
        return F.linear(x.mean(2), weight)


def run_layers(
    layers: Iterable[LaneformerLayer] | nn.ModuleList,
    config: LaneformerConfig,
    embedding: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    masks: Sequence[Tensor | None],
    cache: Cache | None = None,
    share_equal_streams: bool = False,
    lanes: Lanes | None = None,
) -> tuple[Tensor, Partials]:
    """Embeddings (B, S, D) through all layers -> the lanes' streams (B, S, L, D), flushed where the config
    says so, and the partials (attention, mlp) that `deliver` still needs; `masks` holds one entry per layer.
    Without `flush` the other lanes' partials of the last layers are lost, unless the caller calls `deliver`.

    share_equal_streams: one stream (B, S, 1, D) stands for all lanes until a join tells them apart; if
    none does, one is what comes back. The same mathematics, rounded otherwise: products of equal
    streams become larger ones. lanes: those of the layers, all of them by default.
    """
    lanes = lanes or Lanes(config.num_lanes)
    h = embedding[:, :, None]
    if not share_equal_streams:
        h = h.expand(-1, -1, lanes.here, -1)
    # partials of at most `broadcast_delay` layers are in flight: each is L streams wide and freed once
    # it has arrived
    in_flight: Partials = deque([(None, None)] * max(config.broadcast_delay, 1))
    for layer, mask in zip(layers, masks, strict=True):
        h, partials = layer(h, in_flight.popleft(), cos_sin, mask, cache)
        in_flight.append(partials)
    if config.flush:
        return deliver(h, in_flight, config, lanes).expand(-1, -1, lanes.here, -1), deque()
    return h, in_flight


def deliver(
    h: Tensor, tail: Partials, config: LaneformerConfig, lanes: Lanes | None = None
) -> Tensor:
    """Streams (B, S, L, D) and what `run_layers` returns with them -> streams that have every lane's
    partials: (B, S, 1, D), one for all, where they are equal up to rounding.
    """
    lanes, one_for_all = lanes or Lanes(config.num_lanes), config.equal_delivered_streams
    h = h[:, :, :1] if one_for_all else h
    for partials in tail:
        for partial in partials:
            if partial is not None:
                h = h + lanes.receive(partial, one_for_all)
    return h


class Laneformer(nn.Module):
    """The plain PyTorch model: token ids (B, S) int64 -> logits (B, S, V) in the weights' dtype."""

    def __init__(self, config: LaneformerConfig, layer: type[LaneformerLayer] = LaneformerLayer):
        super().__init__()
        if layer is LaneformerLayer and (fields := config.needs_other_layers()):
            raise ValueError(f"{', '.join(fields)} need laneformer.llama.layers.plain_model")
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = LaneRMSNorm(config)
        self.lm_head = LMHead(config)
        drafts = config.num_nextn_predict_layers > 0  # its block counts as one more layer
        self.mtp = MTPHead(config, layer(config, config.num_hidden_layers)) if drafts else None

    def forward(self, input_ids: Tensor, cache: KVCache | None = None) -> Tensor:
        start, new = (cache.length if cache else 0), input_ids.shape[1]
        positions = torch.arange(start + new, device=input_ids.device)
        masks = self.masks(positions[start:], positions)
        embedding, cos_sin = self.embed(input_ids), self.rope(positions[start:])
        h, _ = run_layers(self.layers, self.config, embedding, cos_sin, masks, cache)
        return self.lm_head(h, self.norm, self.tok_embeddings.weight)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token ids (B, S) -> (B, S, D)."""
        return self.tok_embeddings(input_ids)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of integer positions (S,), see positions.py."""
        return rope_table(self.config, positions)

    def masks(self, query_positions: Tensor, key_positions: Tensor) -> list[Tensor | None]:
        """One mask a layer, bool (S, T), see positions.py."""
        return layer_masks(self.config, query_positions, key_positions)

    def init_weights(self, seed: int = 0) -> None:
        """Draw every parameter (see init_parameter); a function of the seed alone."""
        for name, parameter in self.named_parameters():
            init_parameter(self.config, name, parameter, seed)
