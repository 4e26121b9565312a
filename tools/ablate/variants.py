"""The models that are compared: joins of one update table, on the same modules with the same initial weights.

Most variants are switches of `LaneformerConfig`. The neighbours below need another order of joining. Each is a
layer class on the modules of a Laneformer with delay 0, so a seed gives all of them the same parameters.
p_l is lane l's partial output of a module, P the sum over lanes, h_l lane l's stream.

  ladder       every module reads the stream without the output of the module before it (Ladder Residual,
               arXiv 2501.06589): h += P one module late
  parallel     attention and MLP of a layer read the same stream; one sum a layer (GPT-J, PaLM)
  desync_k     only every k-th module sums over lanes, and makes the streams equal: h_l = mean(h) + P; the others join
               as NO_REDUCE does, h_l += sqrt(L) p_l (Desync Residual, of the same paper)
  lost_k       planted faults, which the comparison must find: the outputs of lanes 0 to k - 1 never join
"""

from __future__ import annotations

import functools
import re
from typing import Any

from torch import Tensor, nn

from laneformer import LaneformerConfig
from laneformer.config import Join
from laneformer.model import LaneformerLayer, join_lanes

Handed = tuple[
    Tensor | None, Tensor | None
]  # from a layer to the one after it: with delay 0, `delayed` of its forward
NOTHING: Handed = (None, None)


class NeighbourLayer(LaneformerLayer):
    """A layer whose modules join by the subclass's rule; `count` is the k of its name."""

    def __init__(self, config: LaneformerConfig, layer: int, count: int = 0):
        super().__init__(config, layer)
        self.first_module, self.count = 2 * layer, count
        self.is_last = layer == config.num_hidden_layers - 1

    def adds_sum_only(self, module: int) -> bool:
        """The training layer asks; a rule may need every lane's partial output."""
        return False

    def forward(self, h: Tensor, delayed: Handed, rope: Any, mask: Any = None, cache: Any = None) -> Any:
        attention = self.attention(self.attention_norm(h), rope, mask, cache)
        h = self.joined(h, self.first_module, attention)
        return self.joined(h, self.first_module + 1, self.feed_forward(self.ffn_norm(h))), NOTHING

    def joined(self, h: Tensor, module: int, partial: Tensor) -> Tensor:
        """The streams after the module of this number, (B, S, L or 1, D)."""
        raise NotImplementedError


class Ladder(NeighbourLayer):
    def forward(self, h: Tensor, delayed: Handed, rope: Any, mask: Any = None, cache: Any = None) -> Any:
        attention = self.attention(self.attention_norm(h), rope, mask, cache).sum(2, keepdim=True)
        h = h if delayed[1] is None else h + delayed[1]
        mlp = self.feed_forward(self.ffn_norm(h)).sum(2, keepdim=True)
        h = h + attention
        return (h + mlp, NOTHING) if self.is_last else (h, (None, mlp))


class Parallel(NeighbourLayer):
    def forward(self, h: Tensor, delayed: Handed, rope: Any, mask: Any = None, cache: Any = None) -> Any:
        attention = self.attention(self.attention_norm(h), rope, mask, cache)
        return h + (attention + self.feed_forward(self.ffn_norm(h))).sum(2, keepdim=True), NOTHING


class Desync(NeighbourLayer):
    def joined(self, h: Tensor, module: int, partial: Tensor) -> Tensor:
        if (module + 1) % self.count:
            return join_lanes(h, partial, Join.NO_REDUCE, None)
        return (h.mean(2, keepdim=True) + partial.sum(2, keepdim=True)).expand_as(partial)


class Lost(NeighbourLayer):
    def joined(self, h: Tensor, module: int, partial: Tensor) -> Tensor:
        return h + partial[:, :, self.count :].sum(2, keepdim=True)


RULES = {"ladder": Ladder, "parallel": Parallel, "desync": Desync, "lost": Lost}


@functools.cache  # one class a rule and base: compiled code is shared between layers
def layer_class(rule: str, base: type[LaneformerLayer]) -> type[NeighbourLayer]:
    return type(f"{rule}_{base.__name__}", (RULES[rule], base), {})


def neighbour_layers(config: LaneformerConfig, kind: str, base: type[LaneformerLayer]) -> nn.ModuleList:
    """The layers of a neighbour, on the modules of `base`. ValueError for an unknown kind, or a config with a delay."""
    if not re.fullmatch(r"ladder|parallel|desync_[1-9]\d*|lost_[1-9]\d*", kind):
        raise ValueError(f"joins = {kind!r} is unknown; choose from ladder, parallel, desync_<k>, lost_<k>")
    if config.broadcast_delay:
        raise ValueError(f"variant {kind!r} has joins of its own: leave broadcast_delay at 0")
    rule, _, count = kind.partition("_")
    layer = layer_class(rule, base)  # type: ignore[arg-type]
    return nn.ModuleList(layer(config, i, int(count or 0)) for i in range(config.num_hidden_layers))
