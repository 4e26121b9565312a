"""A dense model cut into lanes, and its layers with a share of the lanes' exchange that comes late.

Cutting changes nothing: heads and intermediate columns are dealt out to lanes, and at delay 0 every lane's
stream is the dense model's. One number per layer says how late it is, `late` in [0, 1]: a lane adds its own
partial output p_l and (1 - late) (P - p_l) of the others' at once, and late (P - p_l) `delay` layers later. 0
is the join PRESENT, 1 is PAST (config.py). The share belongs to the layer that sends, so every output is
counted once, also at the border between layers. What is under way after the last layer is "dropped", as in a
Laneformer, or "flushed": one blocking sum before the final norm, after which all lanes are equal again.

    B batch   S positions   L lanes   D hidden   V vocabulary
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from laneformer import Laneformer
from laneformer.config import Join
from laneformer.engine.folder import Checkpoint, read_checkpoint
from laneformer.model import LaneformerLayer, join_lanes, rope_table
from laneformer.tensors import STORED_TYPES

ENDS = ("dropped", "flushed")
Streams = tuple[Tensor, Tensor | None]  # what run_late returns


def cut(path: Path, lanes: int) -> tuple[Laneformer, Checkpoint]:
    """A Llama-family folder or GGUF file as a Laneformer with delay 0, float32. ValueError for
    lanes it cannot have.
    """
    dense = read_checkpoint(path, lanes=1).config
    sizes = dense.num_attention_heads, dense.num_key_value_heads, dense.intermediate_size
    possible = [n for n in range(1, min(sizes) + 1) if math.gcd(*sizes) % n == 0]
    if lanes not in possible:
        raise ValueError(
            f"lanes = {lanes} must divide {sizes[0]} heads, {sizes[1]} KV heads and {sizes[2]} intermediate columns of "
            f"{path}; choose from {possible}"
        )
    checkpoint = read_checkpoint(path, lanes=lanes, dtype="fp32")
    with torch.device("meta"):
        model = Laneformer(checkpoint.config)
    weights = {}
    for name in checkpoint.tensors:
        stored = checkpoint.tensors[name]
        bits = torch.from_numpy(np.array(stored.values, order="C"))  # a copy: the file is mapped read-only
        weights[name] = bits.view(getattr(torch, STORED_TYPES[stored.dtype].torch)).float()
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(False), checkpoint


def run_late(
    model: Laneformer, layers: Iterable[nn.Module], h: Tensor, first: int, late: Sequence[float], delay: int
) -> Streams:
    """Streams (B, S, L or 1, D) through `layers`, which stand at `first` in the model, with
    a share `late` each.

    Returns the streams, and the sum of what is still under way to each lane, (B, S, L, D), or None.
    """
    positions = torch.arange(h.shape[1], device=h.device)
    rope, masks = rope_table(model.config, positions), model.masks(positions, positions)[first:]
    nothing: tuple[Tensor | None, Tensor | None] = (None, None)
    in_flight = deque([nothing] * max(delay, 1))
    for layer, share, mask in zip(cast("Iterable[LaneformerLayer]", layers), late, masks, strict=False):
        arrived = in_flight.popleft()
        attention = layer.attention(layer.attention_norm(h), rope, mask, None)
        h = joined(h, attention, share, arrived[0])
        mlp = layer.feed_forward(layer.ffn_norm(h))
        h = joined(h, mlp, share, arrived[1])
        in_flight.append((share * attention, share * mlp) if share else nothing)
    under_way = [p.sum(2, keepdim=True) - p for pair in in_flight for p in pair if p is not None]
    return h, torch.stack(under_way).sum(0) if under_way else None


def joined(h: Tensor, partial: Tensor, late: float, arrived: Tensor | None) -> Tensor:
    """The streams with a module's own partials at once, and 1 - late of the others';
    `arrived` is already weighted.
    """
    if not late and arrived is None:
        return join_lanes(h, partial, Join.PRESENT, None)
    h = join_lanes(h, partial, Join.PAST, arrived)
    return h if late == 1 else h + (1 - late) * (partial.sum(2, keepdim=True) - partial)


def dense_layers(model: Laneformer, h: Tensor, first: int, stop: int) -> Tensor:
    """One stream (B, S, 1, D), which stands for all lanes, through layers first to stop - 1 at delay 0."""
    return run_late(model, model.layers[first:stop], h, first, [0.0] * (stop - first), 0)[0]


def logits_of(model: Laneformer, streams: Streams, end: str) -> Tensor:
    """Logits (B, S, V) float32; after a flush all lanes are equal, so the first one stands for them."""
    h, under_way = streams
    h = h if end == "dropped" or under_way is None else (h + under_way)[:, :, :1]
    return model.lm_head(h, model.norm, model.tok_embeddings.weight).float()


@torch.no_grad()
def losses(model: Laneformer, streams: Sequence[Streams], windows: Sequence[Tensor], end: str) -> list[float]:
    """Mean loss of every window, nats a token, for batches of streams and of token ids (B, S + 1)."""
    found: list[float] = []
    for ran, part in zip(streams, windows, strict=True):
        targets = part[:, 1:]
        each = F.cross_entropy(logits_of(model, ran, end).flatten(0, 1), targets.flatten(), reduction="none")
        found += each.view(targets.shape).double().mean(1).tolist()
    return found
