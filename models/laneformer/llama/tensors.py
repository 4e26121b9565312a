"""The tensors of a model of another family under the names and in the shapes of a Laneformer, each when
it is asked for.

Only one translated tensor exists at a time. Lanes own rows or columns (config.py's `tensor_shapes`), and
the rows of queries and keys change their order: Llama rotates the pairs (j, j + d/2) of a head, model.py
the pairs (2j, 2j+1).

    L lanes   D hidden   d head dimension   V vocabulary
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..config import EMBEDDING, HEAD, LaneformerConfig
from ..tensors import STORED_TYPES, Tensor, check_shapes, type_of
from .config import FAMILIES, Family, config_of_llama, logits_factor, text_values
from .interleaved import InterleavedExperts
from .stacked import StackedExperts
from .variant import ROUTER, variant_of

WHOLE = {EMBEDDING: "model.embed_tokens.weight", "norm.weight": "model.norm.weight", HEAD: "lm_head.weight"}
PARTS = {
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj", "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj", "attention.post_norm": "post_attention_layernorm",
    "feed_forward.post_norm": "post_feedforward_layernorm", "attention_norm": "input_layernorm", ROUTER: "mlp.gate",
    "attention.sinks": "self_attn.sinks",
}  # fmt: skip
FFN_NORM = {"pre": "post_attention_layernorm", "both": "pre_feedforward_layernorm"}  # by `norm_placement`
FUSED = {"self_attn.qkv_proj": ("wq", "wk", "wv"), "mlp.gate_up_proj": ("w1", "w3")}
NESTED = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?")  # of a text model beside a vision tower
OTHER_TOWER = re.compile(r"^(?:model\.)?(?:vision_tower|multi_modal_projector)\.")
COLUMNS = ("attention.wo", "feed_forward.w2")  # where a lane owns columns
ROTATED = ("attention.wq", "attention.wk", "attention.q_norm", "attention.k_norm")
IGNORED = re.compile(
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
)  # of old files; a function of the config


def laneformer_of(
    values: Mapping[str, Any], tensors: Mapping[str, Tensor], lanes: int
) -> tuple[LaneformerConfig, LlamaTensors]:
    """A model of one of the families as a Laneformer with delay 0 and `lanes` lanes (see `lanes_for`).

    values: its config.json. tensors: named and shaped as in Hugging Face's folders. ValueError names what is
    missing, misshapen or not supported.
    """
    config = config_of_llama(values, lanes)
    if values is not text_values(values):
        values, tensors = text_values(values), text_tensors(tensors)
    family = FAMILIES[values["model_type"]]
    if variant_of(config).experts and not hasattr(tensors, "shapes"):
        tensors = InterleavedExperts(tensors) if family.interleaved else StackedExperts(tensors)
    return config, LlamaTensors(config, family, tensors, logits_factor(values))


def text_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the text model, named as if it were alone."""
    of_text = {name: tensor for name, tensor in tensors.items() if not OTHER_TOWER.match(name)}
    return {
        NESTED.sub("" if "lm_head" in name else "model.", name): tensor for name, tensor in of_text.items()
    }


class LlamaTensors(Mapping[str, Tensor]):
    """Tensors named and shaped as `config.tensor_shapes` says, made of Hugging Face's on access."""

    def __init__(
        self, config: LaneformerConfig, family: Family, tensors: Mapping[str, Tensor], logits: float = 1.0
    ):
        self.config, self.family, self.tensors, self.logits = config, family, tensors, logits
        self.shapes = config.tensor_shapes()
        self.variant = variant_of(config)
        ropes = self.variant.ropes
        self.rotated = 2 * len(ropes[0].frequencies) if ropes else config.head_dim  # of a head's rows
        # a GGUF file has norms as they are multiplied; it knows its shapes, and widens a tensor when it is asked for
        self.norm_offset = 0.0 if hasattr(tensors, "shapes") else family.norm_offset
        known = getattr(tensors, "shapes", None) or {name: tensors[name].values.shape for name in tensors}
        stored_shapes = {name: known[name] for name in tensors if not IGNORED.fullmatch(name)}
        if config.tie_word_embeddings and stored_shapes.pop(HEAD, None):
            self._expect_tied()
        expected: dict[str, tuple[int, ...]] = {}
        for name in self.shapes:
            source, rows = self._source_of(name), self._source_shape(name)
            before = expected.get(source, (0,))[0] if self.family.fused else 0
            expected[source] = (before + rows[0], *rows[1:])
        check_shapes("the checkpoint", stored_shapes, expected)

    def __getitem__(self, name: str) -> Tensor:
        shape, (part, _) = self.shapes[name], part_of(name)
        stored = self.tensors[self._source_of(name)]
        values = stored.values[self._rows_of(name)]
        if part.endswith("norm"):
            stored, values = self._norm(name, stored)
        if part in ROTATED:
            heads = values.reshape(-1, self.config.head_dim, *values.shape[1:])
            halves = (
                heads[:, : self.rotated].reshape(-1, 2, self.rotated // 2, *values.shape[1:]).swapaxes(1, 2)
            )
            pairs = halves.reshape(len(heads), self.rotated, *values.shape[1:])
            values = np.concatenate((pairs, heads[:, self.rotated :]), 1).reshape(values.shape)
        if stored.dtype not in STORED_TYPES:  # blocks, of which the engine cuts the lanes' rows or columns
            return dataclasses.replace(stored, values=values)
        if part in COLUMNS and name.endswith(".weight"):
            *stacked, lanes, rows, columns = shape
            values = values.reshape(*stacked, rows, lanes, columns).swapaxes(-3, -2)
        return dataclasses.replace(stored, values=values.reshape(shape))

    @property
    def has_blocks(self) -> bool:
        """Whether a folder's matrices are in blocks."""
        return bool(getattr(self.tensors, "has_blocks", False))

    def type_of(self, name: str) -> str:
        """What the tensor of this name comes as, without widening it."""
        return type_of(self.tensors, self._source_of(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def _norm(self, name: str, stored: Tensor) -> tuple[Tensor, np.ndarray]:
        """A norm's weights with what is folded into them, in float32."""
        factor = self.logits if name == "norm.weight" else 1.0
        if not self.norm_offset and factor == 1.0:
            return stored, stored.values
        values = np.float32(factor) * (np.float32(self.norm_offset) + widened(stored))
        return Tensor("fp32", values), values

    def _rows_of(self, name: str) -> slice:
        """Of the source: all of them, or those of this matrix in a fused one."""
        whole = self._source_of(name)
        for fused, parts in FUSED.items() if self.family.fused else ():
            if f".{fused}." in whole:
                rows = {p: self._source_shape(name.replace(name.split(".")[-2], p))[0] for p in parts}
                at = parts.index(name.split(".")[-2])
                first = sum(rows[p] for p in parts[:at])
                return slice(first, first + rows[parts[at]])
        return slice(None)

    def _source_shape(self, name: str) -> tuple[int, ...]:
        shape, (part, kind) = self.shapes[name], part_of(name)
        if kind == "bias":
            return shape if part in (*COLUMNS, ROUTER) else (*shape[:-2], shape[-2] * shape[-1])
        if part in COLUMNS:
            return *shape[:-3], shape[-2], shape[-3] * shape[-1]
        if name == HEAD:
            return self.config.vocab_size, self.config.hidden_size
        return (*shape[:-3], shape[-3] * shape[-2], shape[-1]) if len(shape) >= 3 else shape

    def _source_of(self, name: str) -> str:
        """Hugging Face's name of the tensor that holds one of ours."""
        source = source_of(name, self.variant.norm_placement)
        if self.variant.experts and ROUTER not in name:
            source = source.replace(".mlp.", ".mlp.experts.")
        for fused, parts in FUSED.items() if self.family.fused else ():
            if name.split(".")[-2] in parts:
                return f"{source.rpartition('.self_attn.' if 'self' in fused else '.mlp.')[0]}.{fused}.weight"
        return source

    def _expect_tied(self) -> None:
        """Some files hold the tied head as well."""
        if not np.array_equal(self.tensors[HEAD].values, self.tensors[WHOLE[EMBEDDING]].values):
            raise ValueError(
                "tie_word_embeddings = True, but lm_head.weight is not the embedding; set it to false"
            )


def widened(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == "bf16":
        return (tensor.values.astype(np.uint32) << 16).view(np.float32)
    return (tensor.values.view(np.float16) if tensor.dtype == "fp16" else tensor.values).astype(np.float32)


def part_of(name: str) -> tuple[str, str]:
    """("attention.wq", "weight") of "layers.3.attention.wq.weight"."""
    part, _, kind = re.sub(r"^layers\.\d+\.", "", name).rpartition(".")
    return part, kind


def source_of(name: str, norm_placement: str = "pre") -> str:
    """Hugging Face's name of one of our tensors."""
    if name in WHOLE:
        return WHOLE[name]
    part, kind = part_of(name)
    source = FFN_NORM[norm_placement] if part == "ffn_norm" else PARTS[part]
    return f"model.layers.{name.split('.')[1]}.{source}.{kind}"
