"""A real model: SmolLM2-135M-Instruct in the engine gives Transformers' logits and greedy tokens.

Opt-in: LANEFORMER_SMOLLM2 names the folder that `python -m tools.check smollm2` makes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

from laneformer import Engine
from tests.laneformer.llama.folders import logits_of, reference, relative_error

STARTS = ("The capital of France", "def fibonacci(n):", "Once upon a time", "Water boils when", "The three laws of",
          "She opened the letter and", "In 1969,", "A list of fruits:", "To be or not", "Dear Sir,")  # fmt: skip
MIDDLES = ("", " is", " because", "\n\n1.", ", as everyone in the small town by the river knew,")
PROMPTS = [start + middle for middle in MIDDLES for start in STARTS]
NEW_TOKENS = 48


@pytest.fixture(scope="module")
def folder() -> Path:
    if "LANEFORMER_SMOLLM2" not in os.environ:
        pytest.skip(
            "LANEFORMER_SMOLLM2 is not set: python -m tools.check smollm2 makes the folder it should name"
        )
    return Path(os.environ["LANEFORMER_SMOLLM2"])


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(folder, device="cpu", dtype="fp32", cache=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def truth(folder: Path) -> transformers.PreTrainedModel:
    return reference(folder)


def expect_greedy(engine: Engine, truth: transformers.PreTrainedModel, prompts: list[str]) -> None:
    """Each token is Transformers' best after all before it, so by induction the sequence is its greedy one."""
    assert engine.tokenizer is not None
    for prompt in prompts:
        ids = engine.tokenizer.encode(prompt).ids
        found = engine.generate(ids, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        assert len(found) == NEW_TOKENS
        best = logits_of(truth, ids + found)[len(ids) - 1 : -1].argmax(-1)
        assert found == best.tolist(), prompt


def test_logits(engine: Engine, truth: transformers.PreTrainedModel) -> None:
    """Against float64; Transformers' float32 shows what rounding costs, and another order of sums
    gets 4 times that.
    """
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode(" ".join(PROMPTS)).ids
    single = logits_of(truth, ids)
    exact = logits_of(truth.double(), ids)
    truth.float()
    assert relative_error(engine.logits(ids), exact) < 4 * relative_error(single, exact) < 1e-4


def test_greedy_tokens(engine: Engine, truth: transformers.PreTrainedModel) -> None:
    expect_greedy(engine, truth, PROMPTS[::20])


@pytest.mark.rotate
def test_greedy_tokens_of_fifty_prompts(engine: Engine, truth: transformers.PreTrainedModel) -> None:
    assert len(PROMPTS) == 50
    expect_greedy(engine, truth, PROMPTS)
