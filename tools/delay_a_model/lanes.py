"""A dense model cut into lanes, and its layers with a share of the lanes' exchange that comes late.

Cutting changes nothing: heads and intermediate columns are dealt out to lanes, and at delay 0 every lane's
stream is the dense model's. One number per layer says how late it is, `late` in [0, 1]: a lane adds its own
partial output p_l and (1 - late) (P - p_l) of the others' at once, and late (P - p_l) `delay` layers later. 0
is the join PRESENT, 1 is PAST (config.py). The share belongs to the layer that sends, so every output is
counted once, also at the border between layers. What is in flight after the last layer is "dropped", as in a
Laneformer, or "flushed": one blocking sum before the final norm, after which all lanes are equal again.

    B batch   S positions   L lanes   D hidden   V vocabulary
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from laneformer import Laneformer, LaneformerConfig
from laneformer.config import Join
from laneformer.engine.folder import Checkpoint, read_checkpoint
from laneformer.model import LaneformerLayer, join_lanes
from laneformer.positions import rope_table
from laneformer.supports import refuse_variant
from tools.check.reference import weights_of

ENDS = ("dropped", "flushed")
Pair = tuple[Tensor | None, Tensor | None]  # of attention and MLP
NOTHING: Pair = (None, None)
Streams = tuple[Tensor, Tensor | None]  # what late_streams returns


class LateLayer(LaneformerLayer):
    """A layer of a model with delay 0 of whose outputs the share `late` reaches the other lanes later."""

    late = 0.0

    def adds_sum_only(self, module: int) -> bool:
        """The training layer asks; a late share needs every lane's partial output."""
        return False

    def forward(
        self,
        h: Tensor,
        delayed: Pair,
        rope: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        cache: Any = None,
    ) -> tuple[Tensor, Pair]:
        """`delayed` and what is returned beside the streams are weighted with the share of the layer that sends."""
        attention = self.attention(self.attention_norm(h), rope, mask, cache)
        h = joined(h, attention, self.late, delayed[0])
        mlp = self.feed_forward(self.ffn_norm(h))
        h = joined(h, mlp, self.late, delayed[1])
        return h, (self.late * attention, self.late * mlp) if self.late else NOTHING


def joined(h: Tensor, partial: Tensor, late: float, arrived: Tensor | None) -> Tensor:
    """The streams with a module's own partials at once, and 1 - late of the others'; `arrived` is weighted."""
    if not late and arrived is None:
        return join_lanes(h, partial, Join.PRESENT, None)
    h = join_lanes(h, partial, Join.PAST, arrived)
    return h if late == 1 else h + (1 - late) * (partial.sum(2, keepdim=True) - partial)


def cut(path: Path, lanes: int) -> tuple[Laneformer, Checkpoint]:
    """A Llama-family folder or GGUF file as a model of late layers at delay 0, float32, its head untied.

    ValueError for lanes that it cannot have.
    """
    dense = read_checkpoint(path, lanes=1).config
    refuse_variant(dense, f"{path}: delaying a model", "take one of Llama, Mistral, Qwen or SmolLM")
    sizes = dense.num_attention_heads, dense.num_key_value_heads, dense.intermediate_size
    possible = [n for n in range(1, min(sizes) + 1) if math.gcd(*sizes) % n == 0]
    if lanes not in possible:
        raise ValueError(
            f"lanes = {lanes} must divide {sizes[0]} heads, {sizes[1]} KV heads and {sizes[2]} intermediate columns of "
            f"{path}; choose from {possible}"
        )
    checkpoint = read_checkpoint(path, lanes=lanes, dtype="fp32")
    config = replace(checkpoint.config, tie_word_embeddings=False)
    weights = {name: weight.float() for name, weight in weights_of(checkpoint.tensors).items()}
    weights.setdefault("lm_head.weight", weights["tok_embeddings.weight"].view(config.head_shape))
    return late_model(config, weights), checkpoint


def late_model(config: LaneformerConfig, weights: Mapping[str, Tensor]) -> Laneformer:
    """The plain model with late layers; frozen."""
    with torch.device("meta"):
        model = Laneformer(config)
        model.layers = nn.ModuleList(LateLayer(config, i) for i in range(config.num_hidden_layers))
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(False)


def shares(step: int, layers: int, anneal_steps: int, layers_at_once: int) -> list[float]:
    """The late share of each of so many layers in step 1, 2, ...; groups grow from 0 to 1, the last layers first."""
    groups = [(layers - 1 - i) // layers_at_once for i in range(layers)]
    return [min(1.0, max(0.0, step / anneal_steps - group)) for group in groups]


def set_shares(layers: Iterable[Any], late: Iterable[float]) -> None:
    for layer, share in zip(layers, late, strict=True):
        layer.late = share


def late_streams(
    layers: Iterable[nn.Module], h: Tensor, rope: tuple[Tensor, Tensor], masks: Sequence[Any], delay: int
) -> Streams:
    """Streams (B, S, L or 1, D) through late layers, one mask each.

    Returns the streams, and the sum of what is still in flight to each lane, (B, S, L, D), or None.
    """
    in_flight = deque([NOTHING] * max(delay, 1))
    for layer, mask in zip(layers, masks, strict=True):
        h, sent = layer(h, in_flight.popleft(), rope, mask)
        in_flight.append(sent)
    left = [p.sum(2, keepdim=True) - p for pair in in_flight for p in pair if p is not None]
    return h, torch.stack(left).sum(0) if left else None


def run_late(model: Laneformer, h: Tensor, first: int, late: Sequence[float], delay: int) -> Streams:
    """`late_streams` of a cut model's layers from `first` on, as many as there are shares."""
    positions = torch.arange(h.shape[1], device=h.device)
    layers = model.layers[first : first + len(late)]
    set_shares(layers, late)
    masks = model.masks(positions, positions)[first : first + len(late)]
    return late_streams(layers, h, rope_table(model.config, positions), masks, delay)


def logits_of(model: Laneformer, streams: Streams, end: str) -> Tensor:
    """Logits (B, S, V) float32; after a flush all lanes are equal, so the first one stands for them."""
    h, in_flight = streams
    h = h if end == "dropped" or in_flight is None else (h + in_flight)[:, :, :1]
    return model.lm_head(h, model.norm).float()


@torch.no_grad()
def held_out_losses(
    model: Laneformer,
    inputs: Iterable[Tensor],
    windows: Iterable[Tensor],
    first: int,
    late: Sequence[float],
    delay: int,
) -> dict[str, list[float]]:
    """Mean loss of every window for each end, nats a token, with these shares in layers `first` on.

    inputs: what layer `first` reads, (b, S, L or 1, D). windows: batches of token ids (b, S + 1).
    """
    found: dict[str, list[float]] = {end: [] for end in ENDS}
    for h, part in zip(inputs, windows, strict=True):
        streams, targets = run_late(model, h, first, late, delay), part[:, 1:]
        for end, each in found.items():
            token_losses = F.cross_entropy(logits_of(model, streams, end).mT, targets, reduction="none")
            each += token_losses.double().mean(1).tolist()
    return found


def embedded(model: Laneformer, windows: Iterable[Tensor]) -> list[Tensor]:
    """What layer 0 reads of each batch of windows (b, S + 1): one stream, (b, S, 1, D)."""
    return [model.tok_embeddings(part[:, :-1])[:, :, None] for part in windows]
