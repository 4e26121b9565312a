"""Models of the ablation's variants, as its tests compare them."""

from __future__ import annotations

from torch import Tensor

from laneformer import Laneformer, LaneformerConfig
from laneformer.model import LaneformerLayer
from tools.ablate.variants import neighbour_layers


class Flushed(Laneformer):
    """`flush` by its definition: in the end every stream is the embedding and all lanes' outputs of all modules."""

    def forward(self, input_ids: Tensor, cache: None = None) -> Tensor:
        partials: list[Tensor] = []
        modules = [part for layer in self.layers for part in (layer.attention, layer.feed_forward)]
        kept = [part.register_forward_hook(lambda _, __, output: partials.append(output)) for part in modules]
        super().forward(input_ids)
        for hook in kept:
            hook.remove()
        embedding = self.tok_embeddings(input_ids)
        h = embedding[:, :, None] + sum(partial.sum(2, keepdim=True) for partial in partials)
        return self.lm_head(h.expand_as(partials[0]), self.norm, self.tok_embeddings.weight)


def build(config: LaneformerConfig, kind: str | None, seed: int) -> Laneformer:
    """A model with the seed's weights: `kind` None is what the config says. ValueError for an unknown kind."""
    model = Laneformer(config)
    if kind:
        model.layers = neighbour_layers(config, kind, LaneformerLayer)
    model.init_weights(seed)
    return model
