"""Cut a dense model into lanes, and run layers whose outputs reach the other lanes late.

At delay 0 every lane's stream is the dense model's. With the share `late` in [0, 1] of a layer, a
lane adds its own partial output p_l and (1 - late) (P - p_l) of the others' at once, and
late (P - p_l) `delay` layers later. 0 is the join PRESENT, 1 is PAST (config.py).

    B batch   S positions   L lanes   D hidden   V vocabulary
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laneformer import Laneformer, LaneformerConfig
from laneformer.engine.folder import Checkpoint, read_checkpoint
from laneformer.joins import Join
from laneformer.model import LaneformerLayer, join_lanes
from laneformer.supports import refuse_unsupported
from tools.check.reference import weights_of

# outputs of attention and MLP
Pair = tuple[Tensor | None, Tensor | None]
NOTHING: Pair = (None, None)
# what late_streams returns
Streams = tuple[Tensor, Tensor | None]


class LateLayer(LaneformerLayer):
    """A layer of a model with delay 0 whose share `late` reaches the other lanes later."""

    late = 0.0

    def adds_sum_only(self, module: int) -> bool:
        """Return False: a late share needs every lane's partial output."""
        return False

    def forward(
        self,
        h: Tensor,
        delayed: Pair,
        cos_sin: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        cache: Any = None,
    ) -> tuple[Tensor, Pair]:
        """Return streams and sent outputs, which like `delayed` carry the sender's share."""
        # the share is the sender's, so every output is counted once, also at the border between
        # layers
        attention = self.attention(self.attention_norm(h), cos_sin, mask, cache)
        h = join_late(h, attention, self.late, delayed[0])
        mlp = self.feed_forward(self.ffn_norm(h))
        h = join_late(h, mlp, self.late, delayed[1])
        return h, (self.late * attention, self.late * mlp) if self.late else NOTHING


def join_late(h: Tensor, partial: Tensor, late: float, arrived: Tensor | None) -> Tensor:
    """Add a module's own partials and 1 - late of the others'; `arrived` is already weighted."""
    if not late and arrived is None:
        return join_lanes(h, partial, Join.PRESENT, None)
    h = join_lanes(h, partial, Join.PAST, arrived)
    return h if late == 1 else h + (1 - late) * (partial.sum(2, keepdim=True) - partial)


def cut(path: Path, lanes: int) -> tuple[Laneformer, Checkpoint]:
    """Load a Llama-family folder or GGUF file as late layers at delay 0, float32, head untied.

    ValueError for lanes that it cannot have, and for what training does not support.
    """
    checkpoint = read_checkpoint(path, lanes=lanes, dtype="fp32")
    # as training wants it; the head stays as it is, so an export can tie it again
    config = replace(checkpoint.config, tie_word_embeddings=False)
    refuse_unsupported(config, f"{path}: training")
    weights = {name: weight.float() for name, weight in weights_of(checkpoint.tensors).items()}
    weights.setdefault("lm_head.weight", weights["tok_embeddings.weight"].view(config.head_shape))
    return late_model(config, weights), checkpoint


def late_model(config: LaneformerConfig, weights: Mapping[str, Tensor]) -> Laneformer:
    """Return the plain model with late layers; frozen."""
    # without memory of its own: the weights are assigned, not copied
    with torch.device("meta"):
        model = Laneformer(config)
        model.layers = nn.ModuleList(LateLayer(config, i) for i in range(config.num_hidden_layers))
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(False)


def shares(step: int, layers: int, anneal_steps: int) -> list[float]:
    """Return each layer's late share in step 1, 2, ...: from 0 to 1 one by one, the last first."""
    return [min(1.0, max(0.0, step / anneal_steps - i)) for i in reversed(range(layers))]


def late_streams(
    layers: Iterable[nn.Module],
    h: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    masks: Sequence[Any],
    delay: int,
) -> Streams:
    """Run streams (B, S, L or 1, D) through late layers, one mask each.

    Returns the streams, and the sum still in flight to each lane, (B, S, L, D), or None.
    """
    # delay 0 has a queue of one, which carries NOTHING
    in_flight = deque([NOTHING] * max(delay, 1))
    for layer, mask in zip(layers, masks, strict=True):
        h, outputs = layer(h, in_flight.popleft(), cos_sin, mask)
        in_flight.append(outputs)
    # what is in flight after the last layer: dropped, as in a Laneformer, or flushed by one
    # blocking sum
    partials = [p for p in itertools.chain(*in_flight) if p is not None]
    others = [p.sum(2, keepdim=True) - p for p in partials]
    return h, torch.stack(others).sum(0) if others else None


def logits_of(model: Laneformer, streams: Streams, flush: bool) -> Tensor:
    """Return logits (B, S, V) float32."""
    h, in_flight = streams
    if flush and in_flight is not None:
        # after a flush all lanes are equal, so the first one stands for them
        h = (h + in_flight)[:, :, :1]
    return model.lm_head(h, model.norm).float()
