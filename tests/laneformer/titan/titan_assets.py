"""Small training models, a batch, and losses and gradients by name, for several tests."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from laneformer.joins import Join
from laneformer.model import join_lanes
from laneformer.titan.spec import LaneformerArgs, TitanLaneformer

# float32 through a few layers, each a chain of a few dozen roundings, in any order of summation
ROUNDING = 100 * torch.finfo(torch.float32).eps
Results = dict[str, Tensor]
# a windowed layer and a full one; the second receives the first one's outputs, delayed
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_lanes": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "sliding_window": 24,
    "swa_layers": (0,),
    "broadcast_delay": 1,
    "use_early_comm": False,
    "vocab_size": 512,
}


class PlainJoinNorm:
    """The model's formulas in place of the join and norm kernels, with the partial times 1 + `wrong`."""

    def __init__(self, wrong: float):
        self.wrong = wrong

    def apply(self, h: Tensor, partial, delayed, weight, eps: float, hand_on: bool):
        streams = (
            h if partial is None else join_lanes(h, (1 + self.wrong) * partial, Join.PAST, delayed)
        )
        normed = None
        if weight is not None:
            normed = streams * torch.rsqrt(streams.square().mean(-1, keepdim=True) + eps) * weight
        return streams, normed, partial if hand_on else None


class Watch(TorchDispatchMode):
    """Record what `measure` returns for every operation and its result."""

    def __init__(self, measure):
        super().__init__()
        self.measure, self.values = measure, []

    def __torch_dispatch__(self, operation, types, args=(), options=None):
        out = operation(*args, **(options or {}))
        self.values.append(self.measure(operation, out))
        return out


def build(config, **arguments) -> TitanLaneformer:
    model = TitanLaneformer(LaneformerArgs(config=config, **arguments))
    model.init_weights()
    return model


def draw_tokens(config, length) -> Tensor:
    """Return inputs and labels of two rows, the labels one place later: (2, length + 1)."""
    shape, generator = (2, length + 1), torch.Generator().manual_seed(0)
    return torch.randint(3, config.vocab_size, shape, generator=generator)


def gradients_of(model) -> Results:
    gradients = {
        n.replace("_checkpoint_wrapped_module.", ""): p.grad for n, p in model.named_parameters()
    }
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


def train(model, tokens: Tensor) -> Results:
    model.zero_grad()
    losses = model(tokens[:, :-1], tokens[:, 1:])
    losses.sum().backward()
    return {"losses": losses.detach(), **gradients_of(model)}


def largest_difference(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference of tensors by name, relative to the largest expected value."""
    assert actual.keys() == expected.keys()
    return max(((actual[n] - w).abs().max() / w.abs().max()).item() for n, w in expected.items())
