"""What models of other families (llama/) compute otherwise than a Laneformer, as data.

Such a model is never trained here: it is read, each of its lanes waits for the others, and whoever cannot run it names
what it has (supports.py).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

GATES = ("silu", "gelu_pytorch_tanh", "swiglu_oai")  # in the order of the engine's (cpu/csrc/kernels.h)
NORM_PLACES = ("pre", "post", "both")


class Rope(NamedTuple):
    """How a head's first pairs are rotated; the pairs after them are left as they are.

    frequencies: radians per position of each rotated pair. scale: of the cosine and sine of those. short: the
    frequencies of a context of at most `short_context` positions instead (LongRoPE).
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0
    short: tuple[float, ...] = ()
    short_context: int = 0

    def of_pairs(self, context: int, pairs: int) -> tuple[list[float], list[float]]:
        """Frequency and scale of all of a head's `pairs`, in a context of so many positions."""
        own = self.short if context <= self.short_context else self.frequencies
        rest = pairs - len(own)
        return [*own, *[0.0] * rest], [*[self.scale] * len(own), *[1.0] * rest]


class Experts(NamedTuple):
    """A mixture of experts in place of every layer's MLP; `intermediate_size` is one expert's.

    active: of `total`, those with the largest scores of a router. normed: whether their weights, which are the
    softmax of all scores, are divided by their sum. biased: the router, and all matrices of the experts.
    """

    total: int
    active: int
    normed: bool = True
    biased: bool = False


@dataclass(frozen=True)
class Variant:
    """Differences from a Laneformer; without arguments there is none.

    hidden_act: of the MLP's gate. norm_placement: "pre" norms a module's input, "post" the sum of its lanes' outputs.
    joint_qk_norm: with `qk_norm`, one norm of all heads' queries and one of their keys, on one lane. attention_scale:
    what scores are multiplied with, None for 1 / sqrt(head_dim). query_growth (g, n): queries at position p are
    multiplied with 1 + g log(1 + p // n), which needs ropes. ropes: in place of `rope_theta` and `rope_scaling`; of
    all layers, or of those that see everything and those with a window. experts: None for a dense MLP.
    attention_sinks: a score of each query head that joins every softmax and takes no value. output_bias: of
    attention's output, as `attention_bias` is of its inputs.
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
            object.__setattr__(self, "experts", Experts(*self.experts))
            if not 1 <= self.experts.active <= self.experts.total:
                raise ValueError(f"{self.experts}: `active` must be from 1 to `total`")
        object.__setattr__(self, "ropes", tuple(Rope(tuple(f), s, tuple(t), n) for f, s, t, n in self.ropes))
        if self.query_growth is not None:
            object.__setattr__(self, "query_growth", tuple(self.query_growth))
        for name, known in (("hidden_act", GATES), ("norm_placement", NORM_PLACES)):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name} = {value!r} is unknown; choose from {known}")
        scales = {"attention_scale": self.attention_scale or 1.0, "embedding_scale": self.embedding_scale}
        for name, scale in scales.items():
            if not scale > 0:
                raise ValueError(f"{name} = {scale!r} must be greater than 0")

    @classmethod
    def of(cls, value: Variant | dict[str, Any]) -> Variant:
        """Also of a JSON file's."""
        return cls(**value) if isinstance(value, dict) else value

    @property
    def pre_norms(self) -> bool:
        return self.norm_placement != "post"

    @property
    def post_norms(self) -> bool:
        return self.norm_placement != "pre"

    def own_shapes(self, lanes: int, heads: int, d: int, f: int) -> dict[str, tuple[int, ...]]:
        """Of a layer's biases and sinks, by name; heads of queries, d hidden size, f rows of an MLP."""
        shapes: dict[str, tuple[int, ...]] = {"attention.wo.bias": (d,)} if self.output_bias else {}
        shapes |= {"attention.sinks.weight": (heads,)} if self.attention_sinks else {}
        if self.experts is not None and self.experts.biased:
            total = self.experts.total
            shapes |= {f"feed_forward.{name}.bias": (total, lanes, f // lanes) for name in ("w1", "w3")}
            shapes |= {"feed_forward.w2.bias": (total, d), "feed_forward.router.bias": (total,)}
        return shapes

    def differences(self) -> dict[str, Any]:
        """The fields that are not a Laneformer's, by name; of ropes how many there are."""
        pairs = ((f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self))
        found = {name: value for name, value, plain in pairs if value != plain}
        return found | ({"ropes": len(self.ropes)} if self.ropes else {})

    def check(self, lanes: int, other: bool) -> None:
        """ValueError where the rest of a config does not go with it; `other` is what a Laneformer alone has."""
        if (found := self.differences()) and (other or (self.joint_qk_norm and lanes > 1)):
            needs = (
                "broadcast_delay = 0, replicated_rmsn_scale, no head that drafts; joint_qk_norm num_lanes = 1"
            )
            raise ValueError(f"{', '.join(found)} need {needs}")


NO_VARIANT = Variant()
