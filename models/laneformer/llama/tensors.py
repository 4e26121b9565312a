"""The tensors of a Llama-family model under the names and in the shapes of a Laneformer, each when
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
from .config import config_of_llama

WHOLE = {EMBEDDING: "model.embed_tokens.weight", "norm.weight": "model.norm.weight", HEAD: "lm_head.weight"}
PARTS = {
    "attention_norm": "input_layernorm", "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj", "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj",
}  # fmt: skip
COLUMNS = ("attention.wo", "feed_forward.w2")  # where a lane owns columns
ROTATED = ("attention.wq", "attention.wk", "attention.q_norm", "attention.k_norm")
IGNORED = re.compile(
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
)  # of old files; a function of the config


def laneformer_of(
    values: Mapping[str, Any], tensors: Mapping[str, Tensor], lanes: int
) -> tuple[LaneformerConfig, Mapping[str, Tensor]]:
    """A Llama-family model as a Laneformer with delay 0 and `lanes` lanes (see `lanes_for`).

    values: its config.json. tensors: named and shaped as in Hugging Face's folders. ValueError names what is
    missing, misshapen or not supported.
    """
    config = config_of_llama(values, lanes)
    return config, LlamaTensors(config, tensors)


class LlamaTensors(Mapping[str, Tensor]):
    """Tensors named and shaped as `config.tensor_shapes` says, made of Hugging Face's on access."""

    def __init__(self, config: LaneformerConfig, tensors: Mapping[str, Tensor]):
        self.config, self.tensors, self.shapes = config, tensors, config.tensor_shapes()
        # a GGUF file knows its shapes, and widens a tensor when it is asked for
        known = getattr(tensors, "shapes", None) or {name: tensors[name].values.shape for name in tensors}
        found = {name: known[name] for name in tensors if not IGNORED.fullmatch(name)}
        if config.tie_word_embeddings and found.pop(HEAD, None):
            self._expect_tied()
        check_shapes(
            "the checkpoint", found, {source_of(name): self._source_shape(name) for name in self.shapes}
        )

    def __getitem__(self, name: str) -> Tensor:
        shape, (part, _) = self.shapes[name], part_of(name)
        stored = self.tensors[source_of(name)]
        values = stored.values
        if part in ROTATED:
            halves = values.reshape(-1, 2, self.config.head_dim // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2)
        if stored.dtype not in STORED_TYPES:  # blocks, of which the engine cuts the lanes' rows or columns
            return dataclasses.replace(stored, values=values.reshape(stored.values.shape))
        if part in COLUMNS:
            lanes, rows, columns = shape
            values = values.reshape(rows, lanes, columns).swapaxes(0, 1)
        return dataclasses.replace(stored, values=values.reshape(shape))

    def type_of(self, name: str) -> str:
        """What the tensor of this name comes as, without widening it."""
        return type_of(self.tensors, source_of(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def _source_shape(self, name: str) -> tuple[int, ...]:
        shape, (part, kind) = self.shapes[name], part_of(name)
        if part in COLUMNS:
            return shape[1], shape[0] * shape[2]
        if name == HEAD:
            return self.config.vocab_size, self.config.hidden_size
        if kind == "bias":
            return (shape[0] * shape[1],)
        return (shape[0] * shape[1], shape[2]) if len(shape) == 3 else shape

    def _expect_tied(self) -> None:
        """Some files hold the tied head as well."""
        if not np.array_equal(self.tensors[HEAD].values, self.tensors[WHOLE[EMBEDDING]].values):
            raise ValueError(
                "tie_word_embeddings = True, but lm_head.weight is not the embedding; set it to false"
            )


def part_of(name: str) -> tuple[str, str]:
    """("attention.wq", "weight") of "layers.3.attention.wq.weight"."""
    part, _, kind = re.sub(r"^layers\.\d+\.", "", name).rpartition(".")
    return part, kind


def source_of(name: str) -> str:
    """Hugging Face's name of one of our tensors."""
    if name in WHOLE:
        return WHOLE[name]
    part, kind = part_of(name)
    return f"model.layers.{name.split('.')[1]}.{PARTS[part]}.{kind}"
