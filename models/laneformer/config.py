"""The architecture as data: every tensor's name and shape; joins.py has how partial outputs join.

Field names are those of the Hugging Face config, so that `config.json` and this class
are the same dictionary.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from dataclasses import dataclass
from typing import Any

from .joins import JoinRules
from .ropes import Rope, check_scaling, own_ropes

MATRICES = (
    "attention.wq",
    "attention.wk",
    "attention.wv",
    "attention.wo",
    "feed_forward.w1",
    "feed_forward.w2",
    "feed_forward.w3",
)
NORMS = ("attention_norm", "ffn_norm")  # of a layer, in the order of MODULES
BIASED = ("attention.wq", "attention.wk", "attention.wv")  # by `attention_bias`
HEAD_NORMS = ("attention.q_norm", "attention.k_norm")  # by `qk_norm`: of every head's, before RoPE
EMBEDDING = "tok_embeddings.weight"
HEAD = "lm_head.weight"
LM_HEAD_TYPES = ("vocab_parallel", "replicate", "lane")
MTP = "mtp."  # begins the names of the tensors of the head for multi-token prediction
HEAD_FIELDS = ["num_nextn_predict_layers", "draft_vocab_size", "deliver_tail"]
# int32, ascending: the rows of the head that drafts are scored with; no parameter
DRAFT_IDS = "mtp.draft_ids"


@dataclass(frozen=True)
class LaneformerConfig(JoinRules):
    """Shapes and switches of one Laneformer. Invalid values raise ValueError on construction.

    head_dim (None: hidden_size over num_attention_heads), attention_bias (of queries, keys and values) and qk_norm
    are for checkpoints of other families; what else those have, a subclass says (llama/variant.py). nope_layers
    have no RoPE; window_rope_theta and rope_scaling: ropes.py. num_nextn_predict_layers 1 adds a head that drafts
    tokens (mtp.py), whose block is layer `num_hidden_layers`. draft_vocab_size: ids that it can draft, listed in the
    tensor `mtp.draft_ids`; 0 for all. deliver_tail: its input has the last layers' partials of all lanes.
    """

    hidden_size: int = 3072
    intermediate_size: int = 12288
    num_hidden_layers: int = 15
    num_attention_heads: int = 32
    num_key_value_heads: int = 16
    num_lanes: int = 8
    broadcast_delay: int = 2
    sliding_window: int = 2048
    swa_layers: tuple[int, ...] = tuple(range(10))
    max_position_embeddings: int = 4096
    vocab_size: int = 32000
    lm_head_type: str = "vocab_parallel"
    rope_theta: float = 10000.0
    rope_scaling: dict[str, float | str | bool] | None = None
    norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    replicated_rmsn_scale: bool = True
    use_early_comm: bool = True
    use_attention_comm: bool = True
    use_mlp_comm: bool = True
    pre_norm_lane_agg: bool = False
    rebroadcast_early: bool = False
    first_late_layer: int = 0  # before it lanes wait for each other, whatever the delay
    early_layers: int = 0  # with use_early_comm: so many of those before the delay wait; 0: all
    flush: bool = False  # before the final norm they wait once, for what was never sent
    head_dim: int = None  # type: ignore[assignment]
    attention_bias: bool = False
    qk_norm: bool = False
    nope_layers: tuple[int, ...] = ()
    window_rope_theta: float | None = None
    num_nextn_predict_layers: int = 0
    draft_vocab_size: int = 0
    deliver_tail: bool = True

    def __post_init__(self) -> None:
        for name in ("swa_layers", "nope_layers"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for check in (_check_sizes, _check_lanes, _check_heads, _check_choices, _check_drafts):
            check(self)

    @functools.cached_property
    def ropes(self) -> tuple[Rope, ...]:
        """By kind of layer (ropes.py); none where `rope_theta` and Llama 3's scaling say it all."""
        return own_ropes(self.rope_theta, self.window_rope_theta, self.rope_scaling, self.head_dim)

    def rope_of(self, layer: int) -> int:
        """Which of the ropes a layer has; 0 where there is one, or none."""
        return int(layer in self.swa_layers and len(self.ropes) > 1)

    @property
    def query_size(self) -> int:
        """Outputs of all query heads together; hidden_size unless `head_dim` says otherwise."""
        return self.head_dim * self.num_attention_heads

    @property
    def kv_heads_per_lane(self) -> int:
        return self.num_key_value_heads // self.num_lanes

    def window(self, layer: int) -> int | None:
        """Keys a query of this layer may see, itself included; None for all."""
        return self.sliding_window if layer in self.swa_layers else None

    def extensions(self) -> dict[str, Any]:
        """The fields that only models of other families (llama/) set, where they differ from a Laneformer's."""
        usual = self.hidden_size / self.num_attention_heads
        defaults: dict[str, Any] = {"head_dim": usual, "attention_bias": False, "qk_norm": False}
        return {
            name: getattr(self, name)
            for name, value in defaults.items()
            if getattr(self, name) != value
        }

    def needs_other_layers(self) -> dict[str, Any]:
        """The fields that model.py does not compute; none but in a subclass, see llama/variant.py."""
        return {}

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model, named as in its state dict, and its shape; no head where it is tied.

        A matrix is (L, out / L, in) where a lane owns rows, and (L, out, in / L) where it owns columns; experts'
        are stacked, (E, L, ...).
        """
        d = self.hidden_size
        norm = (d,) if self.replicated_rmsn_scale else (self.num_lanes, d)
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, d)}
        for i in range(self.num_hidden_layers):
            shapes |= self._layer_shapes(f"layers.{i}.", norm)
        head = {} if self.tie_word_embeddings else {HEAD: self.head_shape}
        shapes |= {"norm.weight": norm, **head}
        if self.num_nextn_predict_layers:
            shapes |= {
                f"{MTP}{name}.weight": norm for name in ("hidden_norm", "embedding_norm", "norm")
            }
            shapes |= self._layer_shapes(f"{MTP}layer.", norm)
        return shapes | ({DRAFT_IDS: (self.draft_vocab_size,)} if self.draft_vocab_size else {})

    def _layer_shapes(self, prefix: str, norm: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        shapes = {f"{prefix}{name}.weight": norm for name in NORMS}
        for name, shape in _matrix_shapes(self).items():
            shapes[f"{prefix}{name}.weight"] = shape
            if self.attention_bias and name in BIASED:
                shapes[f"{prefix}{name}.bias"] = shape[:2]
        head_norms = HEAD_NORMS if self.qk_norm else ()
        return shapes | {f"{prefix}{name}.weight": (self.head_dim,) for name in head_norms}

    @property
    def head_shape(self) -> tuple[int, ...]:
        """Of the head's weight, which is the embedding's in another shape where they are tied."""
        lanes, d, v = self.num_lanes, self.hidden_size, self.vocab_size
        other = (v, d) if self.lm_head_type == "replicate" else (lanes, v, d // lanes)
        return (lanes, v // lanes, d) if self.lm_head_type == "vocab_parallel" else other

    def parameter_count(self) -> dict[str, int]:
        """Parameters by part: embedding, one layer's matrices, head, norms, the head that drafts, total."""
        sizes = {
            name: math.prod(shape)
            for name, shape in self.tensor_shapes().items()
            if name != DRAFT_IDS
        }
        return {
            "embedding": sizes[EMBEDDING],
            "layer": sum(sizes[f"layers.0.{name}.weight"] for name in MATRICES),
            "lm_head": sizes.get(HEAD, 0),
            "norms": sum(
                sizes[name]
                for name in sizes
                if name.endswith("norm.weight") and not name.startswith(MTP)
            ),
            "mtp": sum(size for name, size in sizes.items() if name.startswith(MTP)),
            "total": sum(sizes.values()),
        }

    def cached_bytes(self, positions: float, element_bytes: int, scale_bytes: int = 0) -> float:
        """Bytes of keys and values that decoding reads for one token after this many positions; scales are a head's."""
        per_position = 2 * (element_bytes * self.head_dim + scale_bytes) * self.num_key_value_heads
        windows = map(self.window, range(self.num_hidden_layers))
        return per_position * sum(min(positions, window or positions) for window in windows)

    @classmethod
    def from_flavor(cls, name: str, **overrides: Any) -> LaneformerConfig:
        """A named size: `2b` (the published model), `300m`, `tiny` (laptops and tests)."""
        if name not in FLAVORS:
            raise ValueError(f"unknown flavor {name!r}; choose from {sorted(FLAVORS)}")
        return cls(**{**FLAVORS[name], **overrides})

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LaneformerConfig:
        """From a `config.json` dictionary without its Hugging Face bookkeeping; unknown keys are refused."""
        _refuse_unknown_keys(values, [f.name for f in dataclasses.fields(cls)])
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """JSON values; without later fields (other families', of drafts, of joins) where they say nothing."""
        omitted = {"head_dim", "attention_bias", "qk_norm"} - self.extensions().keys()
        omitted |= set() if self.num_nextn_predict_layers else set(HEAD_FIELDS)
        fields = ("first_late_layer", "early_layers", "flush", "nope_layers", "window_rope_theta")
        omitted |= {name for name in fields if not getattr(self, name)}
        values = {
            name: value for name, value in dataclasses.asdict(self).items() if name not in omitted
        }
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }


def _matrix_shapes(config: LaneformerConfig) -> dict[str, tuple[int, ...]]:
    """Of a layer's matrices: (L, out / L, in) where a lane owns rows, (L, out, in / L) where it owns columns."""
    lanes, d, f = config.num_lanes, config.hidden_size, config.intermediate_size
    q, kv = config.query_size, config.head_dim * config.num_key_value_heads
    rows = {"wq": q, "wk": kv, "wv": kv, "w1": f, "w3": f}
    columns = {"wo": q, "w2": f}
    shapes: dict[str, tuple[int, ...]] = {}
    for name in MATRICES:
        part = name.split(".")[1]
        shapes[name] = (
            (lanes, rows[part] // lanes, d) if part in rows else (lanes, d, columns[part] // lanes)
        )
    return shapes


def _refuse_unknown_keys(values: dict[str, Any], field_names: list[str]) -> None:
    for key in values:
        if key not in field_names:
            hints = "".join(
                f"; did you mean {near!r}?"
                for near in difflib.get_close_matches(key, field_names, n=1)
            )
            raise ValueError(f"unknown config key {key!r}{hints}")


def _check_sizes(config: LaneformerConfig) -> None:
    for name in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "num_lanes",
        "sliding_window",
        "max_position_embeddings",
        "vocab_size",
        "head_dim",
    ):
        value = getattr(config, name)
        if name == "head_dim" and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} = {value!r} must be a positive integer")
    if not isinstance(config.broadcast_delay, int) or config.broadcast_delay < 0:
        raise ValueError(
            f"broadcast_delay = {config.broadcast_delay!r} must be an integer >= 0 (counted in layers)"
        )
    for name in ("rope_theta", "window_rope_theta", "norm_eps", "initializer_range"):
        value = getattr(config, name)
        if value is not None and (isinstance(value, str) or not value > 0):
            raise ValueError(f"{name} = {value!r} must be a number greater than 0")


def _check_lanes(config: LaneformerConfig) -> None:
    by_head = {"vocab_parallel": ["vocab_size"], "lane": ["hidden_size"]}.get(
        config.lm_head_type, []
    )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", *by_head):
        value = getattr(config, name)
        if value % config.num_lanes:
            below, above = value - value % config.num_lanes, value + -value % config.num_lanes
            near = f"{below} or {above}" if below else f"{above}"
            raise ValueError(
                f"{name} = {value} is not divisible by num_lanes = {config.num_lanes}; use {near}"
            )


def _check_heads(config: LaneformerConfig) -> None:
    if config.head_dim is None:
        if config.hidden_size % config.num_attention_heads:
            raise ValueError(
                f"hidden_size = {config.hidden_size} is not divisible by "
                f"num_attention_heads = {config.num_attention_heads}; use a multiple, or set head_dim"
            )
        object.__setattr__(config, "head_dim", config.hidden_size // config.num_attention_heads)
    if config.head_dim % 2:
        raise ValueError(
            f"head dimension {config.head_dim} is odd; RoPE rotates pairs, so it must be even"
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads = {config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads = {config.num_key_value_heads}; every KV head serves equally many query heads"
        )


def _check_choices(config: LaneformerConfig) -> None:
    for name in ("swa_layers", "nope_layers"):
        outside = [i for i in getattr(config, name) if i not in range(config.num_hidden_layers)]
        if outside:
            raise ValueError(
                f"{name} holds {outside}, but the layers are 0 to {config.num_hidden_layers - 1}"
            )
    for name in ("first_late_layer", "early_layers"):
        if getattr(config, name) not in range(config.num_hidden_layers):
            raise ValueError(
                f"{name} = {getattr(config, name)!r} must be 0 to {config.num_hidden_layers - 1}"
            )
    if config.lm_head_type not in LM_HEAD_TYPES:
        raise ValueError(
            f"lm_head_type = {config.lm_head_type!r} is unknown; choose from {LM_HEAD_TYPES}"
        )
    if config.pre_norm_lane_agg and config.lm_head_type != "replicate":
        raise ValueError(
            f"pre_norm_lane_agg needs lm_head_type = 'replicate', not {config.lm_head_type!r}"
        )
    if config.tie_word_embeddings and config.lm_head_type == "lane":
        raise ValueError(
            "tie_word_embeddings needs lm_head_type 'vocab_parallel' or 'replicate', not 'lane'"
        )
    if config.rope_scaling is not None:
        check_scaling(config.rope_scaling, config.window_rope_theta)


def _check_drafts(config: LaneformerConfig) -> None:
    depth, ids = config.num_nextn_predict_layers, config.draft_vocab_size
    if depth not in (0, 1):
        raise ValueError(f"num_nextn_predict_layers = {depth!r} is not supported; use 0 or 1")
    if depth and (config.tie_word_embeddings or config.lm_head_type == "lane"):
        kind = "a tied head" if config.tie_word_embeddings else "lm_head_type = 'lane'"
        raise ValueError(
            f"num_nextn_predict_layers = 1 is not supported with {kind}; use an untied head of type "
            "'vocab_parallel' or 'replicate'"
        )
    if ids not in range(0, config.vocab_size + 1, config.num_lanes) or (ids and not depth):
        raise ValueError(
            f"draft_vocab_size = {ids!r} must be a multiple of num_lanes = {config.num_lanes}, at most vocab_size = "
            f"{config.vocab_size}, and 0 without a head that drafts (num_nextn_predict_layers = 0)"
        )


def hf_name(name: str) -> str:
    """The name of a tensor in a Hugging Face folder: ours with `model.` in front, except for the head."""
    return name if name == HEAD else f"model.{name}"


def plain_name(name: str) -> str:
    """The inverse of `hf_name`; a norm of each lane's own is called `scale` in older folders (published.py)."""
    name = name.removeprefix("model.")
    return name.removesuffix("scale") + "weight" if name.endswith("norm.scale") else name


FLAVORS: dict[str, dict[str, Any]] = {
    "2b": {},
    "300m": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_lanes": 4,
        "sliding_window": 64,
        "swa_layers": (0, 1, 2, 3),
        "max_position_embeddings": 512,
        "vocab_size": 4096,
    },
}
