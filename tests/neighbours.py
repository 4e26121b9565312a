"""Models of the ablation's variants, as its tests compare them."""

from __future__ import annotations

from laneformer import Laneformer, LaneformerConfig
from laneformer.model import LaneformerLayer
from tools.ablate.variants import neighbour_layers


def build(config: LaneformerConfig, kind: str | None, seed: int) -> Laneformer:
    """A model with the seed's weights: `kind` None is what the config says. ValueError for an unknown kind."""
    model = Laneformer(config)
    if kind is not None:
        model.layers = neighbour_layers(config, kind, LaneformerLayer)
    model.init_weights(seed)
    return model
