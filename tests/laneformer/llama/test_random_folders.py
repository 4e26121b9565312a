"""Random small folders of every family: the engine against Transformers, and both against model.py in float64.

One of each in the nightly; `LANEFORMER_FOLDERS=60 pytest tests/laneformer/llama/test_random_folders.py` draws 60
of each. All run to the end of their context, past their windows.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from laneformer import Engine
from tests.laneformer.llama.folders import (
    Case,
    logits_of,
    plain_model,
    reference,
    relative_error,
    write_folder,
)

FOLDERS = int(os.environ.get("LANEFORMER_FOLDERS", "1"))  # of each family
MARGIN = 4  # over the distance of Transformers in float32 to float64, whose sums are in another order
LEAST = 1e-6  # of which distances the smallest are, by luck
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Draw:
    """What a family's config may hold; every draw is of the seed alone."""

    def __init__(self, family: str, seed: int):
        self.family, self.rng = family, np.random.default_rng([seed, *family.encode()])

    def one(self, *choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]

    def number(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def case(self) -> Case:
        kv, group, layers = self.one(1, 2, 4), self.one(1, 2, 3), self.number(2, 5)
        dim = self.one(8, 16, 24) if self.family == "Phi3" else self.one(8, 12, 16, 22)
        has_dim = self.family in HAVE_HEAD_DIM
        values: dict[str, Any] = {
            "num_key_value_heads": kv, "num_attention_heads": kv * group, "num_hidden_layers": layers,
            "hidden_size": kv * group * (self.one(6, 10, 14) if has_dim else dim),
            "intermediate_size": self.number(33, 130), "vocab_size": self.number(70, 260),
            "max_position_embeddings": self.number(48, 110), "rms_norm_eps": self.one(1e-5, 1e-6, 1e-3),
            "tie_word_embeddings": self.one(True, False),
        }  # fmt: skip
        values |= {"head_dim": dim} if has_dim else {}
        return Case(self.family, values | self.own(dim, layers), self.one(*DTYPES))

    def plain(self) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": self.one(1e3, 1e4, 5e5)}

    def yarn(self) -> dict[str, Any]:
        more = self.one(
            {}, {"attention_factor": 1.3}, {"mscale": 1.0, "mscale_all_dim": 0.7}, {"truncate": False}
        )
        long = {"factor": self.one(2.0, 4.0, 8.0), "original_max_position_embeddings": self.number(16, 32)}
        return {**self.plain(), "rope_type": "yarn", "beta_fast": self.one(32.0, 8.0), **long, **more}

    def linear(self) -> dict[str, Any]:
        return {**self.plain(), "rope_type": "linear", "factor": self.one(2.0, 8.0)}

    def longrope(self, dim: int) -> dict[str, Any]:
        partial = self.one(1.0, 0.75, 0.5)
        factors = {f"{name}_factor": (1 + 9 * self.rng.random(int(dim * partial) // 2)).tolist()
                   for name in ("short", "long")}  # fmt: skip
        return {**self.plain(), "rope_type": "longrope", "partial_rotary_factor": partial, **factors}

    def experts(self) -> dict[str, Any]:
        count = self.number(1, 20)
        return {"num_experts": count, "num_experts_per_tok": self.number(1, count), "sliding_window": 20,
                "norm_topk_prob": self.one(True, False), "use_sliding_window": self.one(True, False),
                "moe_intermediate_size": self.number(5, 30) * 4}  # fmt: skip

    def own(self, dim: int, layers: int) -> dict[str, Any]:
        window, family = self.number(4, 40), self.family
        rope = self.one(self.plain(), self.yarn(), self.linear())
        kinds = {"full_attention": rope, "sliding_attention": self.plain()}
        types = [self.one("full_attention", "sliding_attention") for _ in range(layers)]
        if family in ("Gemma3Text", "Olmo3"):
            found = {"rope_parameters": kinds, "sliding_window": window, "layer_types": self.one(None, types)}
            return found | ({"query_pre_attn_scalar": self.number(8, 60)} if family == "Gemma3Text" else {})
        if family == "Phi3":
            partial = {**self.plain(), "partial_rotary_factor": self.one(1.0, 0.5)}
            return {"rope_parameters": self.one(self.longrope(dim), partial), "sliding_window": self.one(None, window),
                    "original_max_position_embeddings": 24}  # fmt: skip
        if family == "Ministral3":
            grows = {"llama_4_scaling_beta": self.one(0.1, 0.4), "original_max_position_embeddings": 16}
            return {"rope_parameters": {**self.yarn(), **grows}}
        if family == "GptOss":
            count = self.number(1, 20)
            return {"rope_parameters": self.one(rope, self.yarn()), "sliding_window": window,
                    "num_local_experts": count, "num_experts_per_tok": self.number(1, count),
                    "layer_types": self.one(None, types), "intermediate_size": self.number(5, 30) * 4}  # fmt: skip
        scales = {"rope_parameters": rope}
        if family == "Granite":
            names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
            return scales | {name: self.one(0.22, 0.7, 3.0, 8.0) for name in names}
        windows: dict[str, dict[str, Any]] = {
            "Mistral": {"sliding_window": self.one(None, window)},
            "Ministral": {"sliding_window": window, "layer_types": self.one(None, types)},
            "Qwen2": {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1},
            "Qwen3": {"use_sliding_window": True, "sliding_window": window, "layer_types": types},
            "Qwen3Moe": self.experts(),
            "SmolLM3": {"no_rope_layers": [self.one(0, 1) for _ in range(layers)]},
        }
        return scales | windows.get(family, {})


FAMILIES = ("Llama", "Mistral", "Ministral", "Ministral3", "Qwen2", "Qwen3", "Qwen3Moe", "SmolLM3", "Olmo2", "Olmo3",
            "Granite", "Phi3", "Gemma3Text", "GptOss")  # fmt: skip
HAVE_HEAD_DIM = {"Llama", "Mistral", "Ministral", "Ministral3", "Qwen3", "Qwen3Moe", "Gemma3Text", "GptOss"}


@pytest.mark.rotate
@pytest.mark.parametrize("seed", range(FOLDERS))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_folder(family: str, seed: int, tmp_path: Path) -> None:
    from tools.check.reference import hf_greedy

    case = Draw(family, seed).case()
    folder, context = write_folder(case, tmp_path), case.values["max_position_embeddings"]
    ids = np.random.default_rng(seed).integers(0, case.values["vocab_size"], context).tolist()
    theirs = reference(folder)
    tokens, leads = hf_greedy(theirs, ids[:30], context - 30)
    model = plain_model(folder, torch.float64, threads=2)
    truth, expected = logits_of(model, ids), logits_of(theirs, ids)
    allowed = MARGIN * max(relative_error(expected, truth), LEAST)
    threads = 1 + seed % 3
    with Engine.from_pretrained(folder, threads=threads, cache=False, kv_dtype="fp32") as engine:
        found = engine.logits(ids)
        assert relative_error(found, truth) < allowed, case
        written = engine.generate(ids[:30], max_new_tokens=context - 30, ignore_eos=True)
    tie = 2 * allowed * float(np.abs(truth).max())
    certain = next((i for i, lead in enumerate(leads) if lead < tie), len(leads))
    assert written[:certain] == tokens[:certain]
