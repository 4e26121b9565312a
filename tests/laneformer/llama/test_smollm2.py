"""Tests of SmolLM2-135M-Instruct in the engine against Transformers' logits and greedy tokens.

Opt-in: LANEFORMER_SMOLLM2 names the folder that `python -m tests.smollm2` makes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from laneformer import Engine
from tests.laneformer.llama.folders import logits_of, reference, relative_error

if TYPE_CHECKING:
    pass

STARTS = (
    "The capital of France",
    "def fibonacci(n):",
    "Once upon a time",
    "Water boils when",
    "The three laws of",
    "She opened the letter and",
    "In 1969,",
    "A list of fruits:",
    "To be or not",
    "Dear Sir,",
)
MIDDLES = ("", " is", " because", "\n\n1.", ", as everyone in the small town by the river knew,")
PROMPTS = [start + middle for middle in MIDDLES for start in STARTS]
pytestmark = pytest.mark.rotate


@pytest.fixture(scope="module")
def folder():
    if "LANEFORMER_SMOLLM2" not in os.environ:
        pytest.skip("LANEFORMER_SMOLLM2 is not set: python -m tests.smollm2 makes its folder")
    return Path(os.environ["LANEFORMER_SMOLLM2"])


@pytest.fixture(scope="module")
def engine(folder):
    with Engine.from_pretrained(folder, device="cpu", dtype="fp32", cache=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def truth(folder):
    return reference(folder)


def test_logits(engine, truth):
    # the error of Transformers in float32 is that of rounding; another order of sums is allowed 4x
    ids = engine.tokenizer.encode(" ".join(PROMPTS)).ids
    single = logits_of(truth, ids)
    exact = logits_of(truth.double(), ids)
    truth.float()
    assert relative_error(engine.logits(ids), exact) < 4 * relative_error(single, exact) < 1e-4


def test_greedy_tokens_of_fifty_prompts(engine, truth):
    # each token is Transformers' best after all before it, so by induction the whole sequence is
    assert len(PROMPTS) == 50
    for prompt in PROMPTS:
        ids = engine.tokenizer.encode(prompt).ids
        tokens = engine.generate(ids, max_new_tokens=48, ignore_eos=True)
        best = logits_of(truth, ids + tokens)[len(ids) - 1 : -1].argmax(-1)
        assert tokens == best.tolist(), prompt
