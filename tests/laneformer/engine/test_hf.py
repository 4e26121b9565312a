"""Greedy tokens of the engine and of Hugging Face's `generate`, from the same exported folder.

Both read weights in bf16, fp16 or fp32 and compute in float32. Where they part, that must be a tie: the lead
of generate's token over the engine's is then smaller than what rounding may move the two logits apart. Only
the first parting counts, as the texts differ from there on.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from laneformer import Laneformer
from laneformer.engine import Engine
from laneformer.hf.export import write_code, write_configs, write_weights
from tests.laneformer.engine.assets import TORCH_DTYPES, engine_of, random_ids
from tests.laneformer.hf.hf_assets import random_model
from tools.check.reference import allowed_error

NEW_TOKENS = 32
PROMPTS_EACH = 4
LENGTHS = (1, 2, 5, 15, 16, 17, 40, 90)  # around the window of 16 and far beyond it
MODELS = {
    "as published": {},
    "other joins": {"broadcast_delay": 1, "lm_head_type": "replicate", "swa_layers": (0, 2)},
}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
pytestmark = [pytest.mark.job, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def exported(folder: Path, model: Laneformer, dtype: str) -> Path:
    """The model's folder as the export writes it, without a tokenizer."""
    folder.mkdir()
    write_weights(
        folder, {name: w.to(TORCH_DTYPES[dtype]).contiguous() for name, w in model.state_dict().items()}
    )
    write_configs(
        folder, model.config, DTYPES[dtype], {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    )
    write_code(folder)
    return folder


def rounding_bound(model: Laneformer, logits: np.ndarray, depth: int) -> float:
    """How far apart rounding may move two logits between two float32 programs.

    Each program errs by no more than the allowance of the module that would follow the last one (the head's
    norm and sum are such a module), relative to the whole vector. Errors of sums of equal length are of equal
    size: no logit's is more than five standard deviations. Two logits, two programs.
    """
    config = dataclasses.replace(model.config, num_hidden_layers=model.config.num_hidden_layers + 1)
    typical_size = np.linalg.norm(logits) / np.sqrt(len(logits))
    return float(2 * 2 * 5 * allowed_error(config, depth, "exact")[-1, 0] * typical_size)


def partings(model: Laneformer, engine: Engine, theirs) -> list[dict]:
    """For each prompt whose continuations differ: the first such token, generate's lead there, and the bound."""
    found = []
    for length in LENGTHS:
        prompts = [random_ids(model.config, length, seed) for seed in range(PROMPTS_EACH)]
        answer = theirs.generate(
            torch.tensor(prompts), attention_mask=torch.ones(len(prompts), length, dtype=torch.int64), do_sample=False,
            max_new_tokens=NEW_TOKENS, eos_token_id=None, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        for index, prompt in enumerate(prompts):
            ours = engine.generate(prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True)
            expected = answer.sequences[index, length:].tolist()
            at = next((i for i, (a, b) in enumerate(zip(ours, expected, strict=True)) if a != b), None)
            if at is None:
                continue
            logits = answer.logits[at][index].double().numpy()
            found.append({
                "length": length, "prompt": index, "token": at, "lead": float(logits[expected[at]] - logits[ours[at]]),
                "bound": rounding_bound(model, logits, length + at),
            })  # fmt: skip
    return found


def load(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("overrides", MODELS.values(), ids=MODELS.keys())
def test_greedy_equals_generate(tmp_path, overrides, dtype):
    model = random_model(seed=3, **overrides)
    folder = exported(tmp_path / "hf", model, dtype)
    with Engine.from_pretrained(folder, threads=2, cache=False, kv_dtype="fp32") as engine:
        assert engine.dtype == dtype
        parted = partings(model, engine, load(folder))
    print(f"{len(parted)} prompts part: {parted}")
    assert all(p["lead"] <= p["bound"] for p in parted), parted


def test_a_tie_is_told_from_an_error(tmp_path):
    """Every head row has a twin that is one float32 step off: the order of their logits is left to rounding."""
    model = random_model(seed=4)
    with torch.no_grad():
        rows, twins = model.lm_head.weight.chunk(2, 1)
        steps = torch.randint(-1, 2, rows.shape, generator=torch.Generator().manual_seed(0))
        twins.copy_(rows * (1 + 2.0**-23 * steps))
    folder = exported(tmp_path / "hf", model, "fp32")
    theirs = load(folder)
    with Engine.from_pretrained(folder, cache=False, kv_dtype="fp32") as engine:
        parted = partings(model, engine, theirs)
    print(f"{len(parted)} prompts part: {parted}")
    assert parted, "no tie was met, so nothing was told apart"
    assert all(p["lead"] <= p["bound"] for p in parted), parted
    with engine_of(model, dataclasses.replace(model.config, broadcast_delay=1)) as wrong:
        parted = partings(model, wrong, theirs)
    assert sum(p["lead"] > p["bound"] for p in parted) >= PROMPTS_EACH * len(LENGTHS) // 2, parted
