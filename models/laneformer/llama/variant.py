"""Differences of other model families from a Laneformer, as data.

Such models are only read, never trained here, and their lanes wait for each other. What cannot run
one names what it lacks (supports.py).
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..config import HEAD_NORMS, NORMS, LaneformerConfig
from ..ropes import Rope

# in the order of the engine's (cpu/csrc/kernels.h)
GATES = ("silu", "gelu_pytorch_tanh", "swiglu_oai")
# of modules' outputs, by `norm_placement`
POST_NORMS = ("attention.post_norm", "feed_forward.post_norm")
ROUTER = "feed_forward.router"  # of a mixture of experts


class Experts(NamedTuple):
    """A mixture of experts in place of every layer's MLP; `intermediate_size` is one expert's.

    Attributes:
        active: Experts of `total` that are used: those with the router's largest scores.
        normed: Whether the weights, from the softmax of all scores, are divided by their sum.
        biased: Whether the router and all matrices of the experts have biases.
    """

    total: int
    active: int
    normed: bool = True
    biased: bool = False


@dataclass(frozen=True)
class Variant:
    """Differences from a Laneformer; without arguments there is none.

    Attributes:
        hidden_act: Activation of the MLP's gate.
        norm_placement: "pre" norms a module's input, "post" the sum of its lanes' outputs, "both" both.
        joint_qk_norm: With `qk_norm`, one norm of all heads' queries and one of their keys, on one lane.
        attention_scale: Factor of scores; None for 1 / sqrt(head_dim).
        query_growth: (g, n) multiplies queries at position p by 1 + g log(1 + p // n); needs ropes.
        ropes: In place of `rope_theta` and `rope_scaling`; one of all layers, or two: of layers that see
            everything and of those with a window.
        experts: None for a dense MLP.
        attention_sinks: A score of each query head that joins every softmax and takes no value.
        output_bias: Bias of attention's output, as `attention_bias` is of its inputs.
    """

    hidden_act: str = "silu"
    norm_placement: str = "pre"
    joint_qk_norm: bool = False
    attention_scale: float | None = None
    embedding_scale: float = 1.0
    query_growth: tuple[float, int] | None = None
    ropes: tuple[Rope, ...] = ()
    experts: Experts | None = None
    attention_sinks: bool = False
    output_bias: bool = False

    def __post_init__(self) -> None:
        if self.experts is not None:
            # a JSON file has lists in place of tuples
            object.__setattr__(self, "experts", Experts(*self.experts))
            if not 1 <= self.experts.active <= self.experts.total:
                raise ValueError(f"{self.experts}: `active` must be from 1 to `total`")
        object.__setattr__(
            self, "ropes", tuple(Rope(tuple(f), s, tuple(t), n) for f, s, t, n in self.ropes)
        )
        if self.query_growth is not None:
            object.__setattr__(self, "query_growth", tuple(self.query_growth))

    @property
    def pre_norms(self) -> bool:
        return self.norm_placement != "post"

    @property
    def post_norms(self) -> bool:
        return self.norm_placement != "pre"

    def differences(self) -> dict[str, Any]:
        fields = dataclasses.fields(self)
        changed = {
            f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default
        }
        return changed | ({"ropes": len(self.ropes)} if self.ropes else {})


@dataclass(frozen=True)
class FamilyConfig(LaneformerConfig):
    """The config of another family's model; `variant` takes precedence over a Laneformer's fields."""

    variant: Variant = field(default_factory=Variant)

    def __post_init__(self) -> None:
        if isinstance(self.variant, dict):  # of a JSON file
            object.__setattr__(self, "variant", Variant(**self.variant))
        super().__post_init__()
        changed, is_joint = self.variant.differences(), self.variant.joint_qk_norm
        has_lane_fields = (
            self.broadcast_delay or self.num_nextn_predict_layers or not self.replicated_rmsn_scale
        )
        # a joint norm is over all heads, so they stay on one lane
        if changed and (has_lane_fields or (is_joint and self.num_lanes > 1)):
            raise ValueError(
                f"{', '.join(changed)} need broadcast_delay = 0, replicated_rmsn_scale, no head that drafts; "
                "joint_qk_norm num_lanes = 1"
            )

    @functools.cached_property
    def ropes(self) -> tuple[Rope, ...]:
        return self.variant.ropes or super().ropes

    def extensions(self) -> dict[str, Any]:
        return super().extensions() | self.variant.differences()

    def needs_other_layers(self) -> dict[str, Any]:
        changed = self.variant.differences()
        changed.pop("ropes", None)
        return changed

    def _layer_shapes(self, prefix: str, norm: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        variant, shapes = self.variant, super()._layer_shapes("", norm)
        if not variant.pre_norms:
            for name in NORMS:
                del shapes[f"{name}.weight"]
        if variant.post_norms:
            shapes |= {f"{name}.weight": norm for name in POST_NORMS}
        if variant.joint_qk_norm and self.qk_norm:
            sizes = self.query_size, self.head_dim * self.num_key_value_heads
            shapes |= {
                f"{name}.weight": (size,) for name, size in zip(HEAD_NORMS, sizes, strict=True)
            }
        if variant.output_bias:
            shapes["attention.wo.bias"] = (self.hidden_size,)
        if variant.attention_sinks:
            shapes["attention.sinks.weight"] = (self.num_attention_heads,)
        if (experts := variant.experts) is not None:
            total, d = experts.total, self.hidden_size
            for name in ("w1", "w2", "w3"):
                shapes[f"feed_forward.{name}.weight"] = (
                    total,
                    *shapes[f"feed_forward.{name}.weight"],
                )
            shapes[f"{ROUTER}.weight"] = (total, d)
            if experts.biased:
                inner = (total, self.num_lanes, self.intermediate_size // self.num_lanes)
                shapes |= {f"feed_forward.{name}.bias": inner for name in ("w1", "w3")}
                shapes |= {"feed_forward.w2.bias": (total, d), f"{ROUTER}.bias": (total,)}
        return {prefix + name: shape for name, shape in shapes.items()}


def variant_of(config: LaneformerConfig) -> Variant:
    return config.variant if isinstance(config, FamilyConfig) else Variant()
