"""The Transformers config: the fields of LaneformerConfig under the same names, and Transformers' own bookkeeping.

An exported folder carries this file beside config.py, from which every field, default and check comes.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from transformers import PretrainedConfig

from ..config import BOS, EOS, UNK, LaneformerConfig

FIELDS = {field.name: field.default for field in dataclasses.fields(LaneformerConfig)}


class LaneformerHFConfig(PretrainedConfig):
    """`config.json` of a Laneformer; an invalid value or a misspelt architecture key raises ValueError."""

    model_type = "laneformer"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  (Transformers reads this very name)
    rope_scaling = None  # shadows the property of 5.x, which would store the value under another name

    def __init__(self, bos_token_id: int = BOS, eos_token_id: int = EOS, pad_token_id: int = UNK, **kwargs: Any):
        values = {name: kwargs.pop(name, default) for name, default in FIELDS.items()}
        for key in kwargs:
            near = difflib.get_close_matches(key, FIELDS, n=1, cutoff=0.85)
            if near and not hasattr(PretrainedConfig, key):
                raise ValueError(f"unknown config key {key!r}; did you mean {near[0]!r}?")
        for name, value in LaneformerConfig.from_dict(values).to_dict().items():
            setattr(self, name, value)
        kwargs |= {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
        kwargs["tie_word_embeddings"] = self.tie_word_embeddings  # else 4.57 would put back its own default, true
        super().__init__(**kwargs)

    @property
    def layer_types(self) -> list[str]:
        """What Transformers' masks and caches go by; derived, so that `swa_layers` is the only place that says it."""
        return [
            "sliding_attention" if i in self.swa_layers else "full_attention" for i in range(self.num_hidden_layers)
        ]

    def to_lanes(self) -> LaneformerConfig:
        """The architecture alone, as the model's own code takes it."""
        return LaneformerConfig.from_dict({name: getattr(self, name) for name in FIELDS})
