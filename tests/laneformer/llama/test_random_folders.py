"""Folders of every family in random sizes: the engine against Transformers, and both against model.py in float64.

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
    CASES,
    YARN,
    Case,
    logits_of,
    plain_model,
    reference,
    relative_error,
    write_folder,
)

FOLDERS = int(os.environ.get("LANEFORMER_FOLDERS", "1"))  # of each case
MARGIN = 4  # over the distance of Transformers in float32 to float64, whose sums are in another order
LEAST = 1e-6  # of which distances the smallest are, by luck
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROPES: list[dict[str, Any]] = [
    *({"rope_type": "default", "rope_theta": theta} for theta in (1e3, 1e4, 5e5)),
    *({"rope_type": "linear", "rope_theta": 1e4, "factor": factor} for factor in (2.0, 8.0)),
    *(YARN | more for more in ({}, {"attention_factor": 1.3}, {"mscale": 1.0, "mscale_all_dim": 0.7},
                               {"truncate": False}, {"beta_fast": 8.0, "factor": 8.0})),
]  # fmt: skip


def draw_case(name: str, seed: int) -> Case:
    """The case with other sizes, of the seed alone; what depends on a size that stays is as it was."""
    case, rng = CASES[name], np.random.default_rng([seed, *name.encode()])
    values: dict[str, Any] = dict(case.values)

    def one(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    def number(low: int, high: int) -> int:
        return int(rng.integers(low, high + 1))

    kv, group = one(1, 2, 4), one(1, 2, 3)
    dim = 16 if case.kind == "Phi3" else one(8, 12, 16, 22)  # Phi's factors are of its pairs
    if "head_dim" in values:
        values["head_dim"], width = dim, one(6, 10, 14)
    else:
        width = dim
    values |= {
        "num_key_value_heads": kv, "num_attention_heads": kv * group, "hidden_size": kv * group * width,
        "intermediate_size": number(9, 32) * 4, "vocab_size": number(131, 260), "rms_norm_eps": one(1e-5, 1e-6, 1e-3),
        "max_position_embeddings": number(48, 110), "tie_word_embeddings": one(True, False),
    }  # fmt: skip
    if "original_max_position_embeddings" in values:
        values["original_max_position_embeddings"] = 24  # Transformers changes factors when a text passes it
    if values.get("sliding_window"):
        values["sliding_window"] = number(4, 40)
    if "num_experts_per_tok" in values:
        count = number(1, 20)
        values |= {"num_experts_per_tok": number(1, count)}
        values["num_local_experts" if case.kind == "GptOss" else "num_experts"] = count
    if "rope_parameters" not in values and case.kind != "Phi3":
        values["rope_parameters"] = one(*ROPES)
    return Case(case.kind, values, one(*DTYPES))


@pytest.mark.rotate
@pytest.mark.parametrize("seed", range(FOLDERS))
@pytest.mark.parametrize("name", CASES)
def test_a_random_folder(name: str, seed: int, tmp_path: Path) -> None:
    from tools.check.reference import hf_greedy

    case = draw_case(name, seed)
    folder, context = write_folder(case, tmp_path), case.values["max_position_embeddings"]
    ids = np.random.default_rng(seed).integers(0, case.values["vocab_size"], context).tolist()
    theirs = reference(folder)
    tokens, leads = hf_greedy(theirs, ids[:30], context - 30)
    truth = logits_of(plain_model(folder, torch.float64, threads=2), ids)
    allowed = MARGIN * max(relative_error(logits_of(theirs, ids), truth), LEAST)
    with Engine.from_pretrained(folder, threads=1 + seed % 3, cache=False, kv_dtype="fp32") as engine:
        assert relative_error(engine.logits(ids), truth) < allowed, case
        written = engine.generate(ids[:30], max_new_tokens=context - 30, ignore_eos=True)
    tie = 2 * allowed * float(np.abs(truth).max())
    certain = next((i for i, lead in enumerate(leads) if lead < tie), len(leads))
    assert written[:certain] == tokens[:certain]
