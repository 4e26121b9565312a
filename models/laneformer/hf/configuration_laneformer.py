"""The Transformers config: the fields of LaneformerConfig under the same names.

An exported folder has this file next to config.py, which has every field, default and check.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from transformers import PretrainedConfig

from ..config import LaneformerConfig

# Transformers 4.57 copies what this file imports, not what config.py does
from ..joins import MODULES  # noqa: F401
from ..ropes import LLAMA3_KEYS  # noqa: F401

FIELDS = {f.name: f.default for f in dataclasses.fields(LaneformerConfig)}


class LaneformerHFConfig(PretrainedConfig):
    """`config.json` of a Laneformer; an invalid value or a misspelt architecture key raises ValueError."""

    model_type = "laneformer"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012  (Transformers reads this name)
    # shadows the property of 5.x, which would store the value under another name
    rope_scaling = None

    def __init__(self, **kwargs: Any):
        values = {name: kwargs.pop(name, default) for name, default in FIELDS.items()}
        for key in kwargs:
            near = difflib.get_close_matches(key, FIELDS, n=1, cutoff=0.85)
            if near and not hasattr(PretrainedConfig, key):
                raise ValueError(f"unknown config key {key!r}; did you mean {near[0]!r}?")
        lanes = LaneformerConfig.from_dict(values)
        for name in FIELDS:
            value = getattr(lanes, name)
            setattr(self, name, list(value) if isinstance(value, tuple) else value)
        # else 4.57 restores its own default, True
        kwargs["tie_word_embeddings"] = self.tie_word_embeddings
        super().__init__(**kwargs)

    @property
    def layer_types(self) -> list[str]:
        """Return the kinds of layers that Transformers' masks and caches read, derived from `swa_layers`."""
        types = ("full_attention", "sliding_attention")
        return [types[i in self.swa_layers] for i in range(self.num_hidden_layers)]

    def to_lanes(self) -> LaneformerConfig:
        return LaneformerConfig.from_dict({name: getattr(self, name) for name in FIELDS})
