"""The training model is the plain one, arranged differently: the same losses and gradients for
every kind of join.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from laneformer import LaneformerConfig
from laneformer.titan import products
from laneformer.titan.parallelize import apply_selective_checkpointing
from laneformer.titan.spec import LaneformerArgs, TitanLaneformer
from tests.laneformer.test_model import FLOAT64_TOLERANCE, HEADS, IDS, SMALL, build

Gradients = dict[str, Tensor]
COMMS = [(True, True), (False, True), (True, False), (False, False)]  # of attention, of the MLP


def losses_and_gradients(model: nn.Module, losses: Tensor) -> tuple[Tensor, Gradients]:
    losses.sum().backward()
    named = {n.replace("_checkpoint_wrapped_module.", ""): p.grad for n, p in model.named_parameters()}
    return losses.detach(), {name: gradient for name, gradient in named.items() if gradient is not None}


def largest_difference(**overrides: object) -> float:
    """Of losses and gradients, relative to each tensor's largest: the training model beside the plain one."""
    plain = build(**overrides)
    model = TitanLaneformer(LaneformerArgs(config=plain.config)).double()
    model.load_state_dict(plain.state_dict())
    apply_selective_checkpointing(model)
    tokens = torch.tensor([IDS, IDS[::-1]])
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    plain_losses = nn.functional.cross_entropy(plain(inputs).mT, labels, reduction="none")
    wanted = losses_and_gradients(plain, plain_losses)
    found = losses_and_gradients(model, model(inputs, labels))
    assert found[1].keys() == wanted[1].keys()
    pairs = [(found[0], wanted[0]), *((found[1][name], wanted[1][name]) for name in wanted[1])]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


@pytest.mark.parametrize("delay", [0, 1, 2, 3])
@pytest.mark.parametrize("early", [True, False])
def test_every_join(delay: int, early: bool) -> None:
    for (attention, mlp), other in itertools.product(COMMS, [False, True]):
        options = {
            "broadcast_delay": delay, "use_early_comm": early, "use_attention_comm": attention, "use_mlp_comm": mlp,
            "rebroadcast_early": other, "replicated_rmsn_scale": not other,
        }  # fmt: skip
        assert largest_difference(**options) < FLOAT64_TOLERANCE, options


@pytest.mark.parametrize("first", [0, 1, 4])
@pytest.mark.parametrize("flush", [True, False])
def test_late_upper_layers_and_the_flush(first: int, flush: bool) -> None:
    for delay, head in zip((0, 1, 2, 3), HEADS, strict=True):
        options = {"broadcast_delay": delay, "first_late_layer": first, "flush": flush, **head}
        assert largest_difference(**options) < FLOAT64_TOLERANCE, options


@pytest.mark.parametrize("head", HEADS, ids=lambda head: "-".join(map(str, head.values())))
@pytest.mark.parametrize("delay", [0, 2])
def test_every_head(head: dict[str, object], delay: int) -> None:
    """With delay 0 no join tells the lanes apart, and one stream reaches the head."""
    assert largest_difference(broadcast_delay=delay, **head) < FLOAT64_TOLERANCE


def test_a_wrong_weight_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes in the wrong order within one product: the smallest mistake that LaneSum could make."""
    wrong = lambda self, x: torch.einsum("bsli,loi->bso", x, self.weight.flip(0))[:, :, None]  # noqa: E731
    monkeypatch.setattr(products.LaneSum, "forward", wrong)
    assert largest_difference() > 1e9 * FLOAT64_TOLERANCE


def streams(**overrides: object) -> list[int]:
    """How many streams leave each layer."""
    config = LaneformerConfig(**{**SMALL, **overrides})
    model = TitanLaneformer(LaneformerArgs(config=config))
    model.init_weights()
    found: list[int] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda layer, inputs, output: found.append(output[0].shape[2]))
    model(torch.tensor([IDS]))
    return found


def test_equal_streams_are_one() -> None:
    """Until a join tells the lanes apart, whatever their norms' scales do."""
    assert streams(broadcast_delay=2) == [1, 1, 2, 2, 2, 2]
    assert streams(broadcast_delay=3, replicated_rmsn_scale=False) == [1, 1, 1, 2, 2, 2]
    assert streams(broadcast_delay=0) == [1] * 6
    assert streams(broadcast_delay=1, first_late_layer=4, flush=True) == [1, 1, 1, 1, 2, 2]
    assert streams(use_early_comm=False) == streams(use_mlp_comm=False) == [2] * 6
