"""The architecture as data: every tensor's name and shape, and how each partial output joins the residual stream.

Field names are those of the Hugging Face config, so that `config.json` and this class are the same dictionary.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
from dataclasses import dataclass
from typing import Any

MODULES = ("attention", "mlp")
MATRICES = ("attention.wq", "attention.wk", "attention.wv", "attention.wo",
            "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")  # fmt: skip
NORMS = ("attention_norm", "ffn_norm")  # of a layer, in the order of MODULES
HEAD = "lm_head.weight"
LM_HEAD_TYPES = ("vocab_parallel", "replicate", "lane")
ROPE_SCALING_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class Join(str, enum.Enum):  # noqa: UP042  (StrEnum needs Python 3.11, exported folders also run on 3.10)
    """How lane l's partial output p_l joins its residual stream h_l (P is the sum of p over all lanes).

    Compare with `==`: Transformers may import remote code twice, and then there are two of each member.
    The order is that of the engines' enums (cpu/csrc/model.h; the CUDA kernels' is generated from this one).
    """

    PRESENT = "h_l += P: a blocking all-reduce, every lane sees everything at once"
    NO_REDUCE = "h_l += sqrt(L) * p_l: no exchange between lanes"
    PAST = "h_l += p_l + (P' - p'_l): the other lanes' outputs arrive `broadcast_delay` layers late"

    @property
    def code(self) -> int:
        return list(type(self)).index(self)


@dataclass(frozen=True)
class LaneformerConfig:
    """Shapes and switches of one Laneformer. Invalid values raise ValueError on construction."""

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
    rope_scaling: dict[str, Any] | None = None
    norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    replicated_rmsn_scale: bool = True
    use_early_comm: bool = True
    use_attention_comm: bool = True
    use_mlp_comm: bool = True
    pre_norm_lane_agg: bool = False
    rebroadcast_early: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "swa_layers", tuple(self.swa_layers))
        self._check_sizes()
        self._check_lanes()
        self._check_choices()

    def _check_sizes(self) -> None:
        for name in (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "num_lanes", "sliding_window", "max_position_embeddings", "vocab_size",
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} = {value!r} must be a positive integer")
        if not isinstance(self.broadcast_delay, int) or self.broadcast_delay < 0:
            raise ValueError(f"broadcast_delay = {self.broadcast_delay!r} must be an integer >= 0 (counted in layers)")
        for name in ("rope_theta", "norm_eps", "initializer_range"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)!r} must be greater than 0")

    def _check_lanes(self) -> None:
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size", "hidden_size"):
            value = getattr(self, name)
            if value % self.num_lanes:
                below, above = value - value % self.num_lanes, value + -value % self.num_lanes
                near = f"{below} or {above}" if below else f"{above}"
                raise ValueError(f"{name} = {value} is not divisible by num_lanes = {self.num_lanes}; use {near}")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size = {self.hidden_size} is not divisible by num_attention_heads = {self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head dimension {self.head_dim} is odd; RoPE rotates pairs, so it must be even")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads = {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads = {self.num_key_value_heads}; every KV head serves equally many query heads"
            )

    def _check_choices(self) -> None:
        outside = [i for i in self.swa_layers if i not in range(self.num_hidden_layers)]
        if outside:
            raise ValueError(f"swa_layers holds {outside}, but the layers are 0 to {self.num_hidden_layers - 1}")
        if self.lm_head_type not in LM_HEAD_TYPES:
            raise ValueError(f"lm_head_type = {self.lm_head_type!r} is unknown; choose from {LM_HEAD_TYPES}")
        if self.pre_norm_lane_agg and self.lm_head_type != "replicate":
            raise ValueError(f"pre_norm_lane_agg needs lm_head_type = 'replicate', not {self.lm_head_type!r}")
        if self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings = True is not supported: the head's layout is per lane; use False")
        if self.rope_scaling is not None:
            missing = [k for k in ROPE_SCALING_KEYS if k not in self.rope_scaling]
            if missing:
                raise ValueError(f"rope_scaling lacks {missing}; it needs {list(ROPE_SCALING_KEYS)} (Llama-3 style)")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def kv_heads_per_lane(self) -> int:
        return self.num_key_value_heads // self.num_lanes

    def window(self, layer: int) -> int | None:
        """Keys a query of this layer may see, itself included; None for all."""
        return self.sliding_window if layer in self.swa_layers else None

    def join(self, layer: int, module: str) -> Join:
        """How the outputs of `module` ("attention" or "mlp") in `layer` join the residual stream."""
        assert module in MODULES, f"unknown module {module!r}, expected one of {MODULES}"
        if not (self.use_attention_comm if module == "attention" else self.use_mlp_comm):
            return Join.NO_REDUCE
        if self.broadcast_delay == 0:
            return Join.PRESENT  # PAST with delay 0 is p + (P - p) = P
        if layer >= self.broadcast_delay:
            return Join.PAST
        return Join.PRESENT if self.use_early_comm else Join.NO_REDUCE

    def broadcasts(self, layer: int, module: str) -> bool:
        """Whether the partial outputs of `layer` are added by the other lanes `broadcast_delay` layers later."""
        target = layer + self.broadcast_delay
        if target >= self.num_hidden_layers or self.join(target, module) is not Join.PAST:
            return False
        return self.rebroadcast_early or self.join(layer, module) is not Join.PRESENT

    def adds_delayed(self, layer: int, module: str) -> bool:
        """Whether the other lanes' partial outputs of `broadcast_delay` layers ago join the stream in this layer."""
        return self.join(layer, module) == Join.PAST and self.broadcasts(layer - self.broadcast_delay, module)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model, named as in its state dict, and its shape.

        A matrix is (L, out / L, in) where a lane owns rows, and (L, out, in / L) where it owns columns.
        """
        lanes, d, f, v = self.num_lanes, self.hidden_size, self.intermediate_size, self.vocab_size
        kv = self.head_dim * self.num_key_value_heads
        norm = (d,) if self.replicated_rmsn_scale else (lanes, d)
        heads = {"vocab_parallel": (lanes, v // lanes, d), "replicate": (v, d), "lane": (lanes, v, d // lanes)}
        rows = {"wq": d, "wk": kv, "wv": kv, "w1": f, "w3": f}
        columns = {"wo": d, "w2": f}
        shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (v, d)}
        for i in range(self.num_hidden_layers):
            shapes |= {f"layers.{i}.{name}.weight": norm for name in NORMS}
            for name in MATRICES:
                part = name.split(".")[1]
                shape = (lanes, rows[part] // lanes, d) if part in rows else (lanes, d, columns[part] // lanes)
                shapes[f"layers.{i}.{name}.weight"] = shape
        return {**shapes, "norm.weight": norm, HEAD: heads[self.lm_head_type]}

    def parameter_count(self) -> dict[str, int]:
        """Parameters by part: embedding, one layer's matrices, head, norms, total."""
        sizes = {name: math.prod(shape) for name, shape in self.tensor_shapes().items()}
        return {
            "embedding": sizes["tok_embeddings.weight"],
            "layer": sum(sizes[f"layers.0.{name}.weight"] for name in MATRICES),
            "lm_head": sizes[HEAD],
            "norms": sum(size for name, size in sizes.items() if name.endswith("norm.weight")),
            "total": sum(sizes.values()),
        }

    def cached_bytes(self, positions: float, element_bytes: int) -> float:
        """Bytes of keys and values that decoding reads for one token after this many positions."""
        per_position = 2 * element_bytes * self.head_dim * self.num_key_value_heads
        return per_position * sum(min(positions, self.window(i) or positions) for i in range(self.num_hidden_layers))

    @classmethod
    def from_flavor(cls, name: str, **overrides: Any) -> LaneformerConfig:
        """A named size: `2b` (the published model), `300m`, `tiny` (laptops and tests)."""
        if name not in FLAVORS:
            raise ValueError(f"unknown flavor {name!r}; choose from {sorted(FLAVORS)}")
        return cls(**{**FLAVORS[name], **overrides})

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LaneformerConfig:
        """From a `config.json` dictionary without its Hugging Face bookkeeping; unknown keys are refused."""
        known = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                raise ValueError(f"unknown config key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "swa_layers": list(self.swa_layers)}


def hf_name(name: str) -> str:
    """The name of a tensor in a Hugging Face folder: ours with `model.` in front, except for the head."""
    return name if name == HEAD else f"model.{name}"


def plain_name(name: str) -> str:
    """The inverse of `hf_name`."""
    return name.removeprefix("model.")


FLAVORS: dict[str, dict[str, Any]] = {
    "2b": {},
    "300m": {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 8},
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


def flops_per_token(config: LaneformerConfig, seq_len: int) -> int:
    """Training FLOPs per token: 6 for every weight that multiplies, 12 d for every head and key that a query sees.

    Keys outside the causal triangle or the sliding window are not counted, and neither is recomputation.
    """
    counts = config.parameter_count()
    matrices = counts["total"] - counts["embedding"] - counts["norms"]
    keys = 0.0
    for layer in range(config.num_hidden_layers):
        window = min(config.window(layer) or seq_len, seq_len)
        keys += (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len
    return int(6 * matrices + 12 * config.hidden_size * keys)
