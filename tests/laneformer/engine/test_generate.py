"""Generation: greedy identity with PyTorch, and where it ends."""

from __future__ import annotations

import pytest
import torch

from laneformer.engine import Engine
from tests.laneformer.engine.assets import (
    engine_of,
    random_ids,
    random_model,
    small_config,
    widened,
    write_folder,
)


@torch.no_grad()
def torch_greedy(model, prompt: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens in float32 without a cache, and each one's lead over the second best logit."""
    wide, ids, margins = widened(model, torch.float32), list(prompt), []
    for _ in range(new_tokens):
        best = wide(torch.tensor([ids]))[0, -1].topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    return ids[len(prompt) :], margins


def assert_same_tokens(tokens: list[int], expected: list[int], margins: list[float]) -> None:
    for i, (token, wanted) in enumerate(zip(tokens, expected, strict=True)):
        assert token == wanted, f"token {i}: {token} instead of {wanted}, whose lead was {margins[i]:.3g}"


@pytest.mark.parametrize(("dtype", "length"), [("bf16", 1), ("fp16", 5), ("fp32", 40)])
def test_greedy_equals_pytorch_and_the_comparison_sees_a_wrong_delay(dtype, length):
    """Prompts before, at and far beyond the window of 7."""
    model = random_model(small_config(), seed=length, dtype=dtype)
    prompt = random_ids(model.config, length, length)
    expected, margins = torch_greedy(model, prompt, 40)
    with engine_of(model, threads=2) as engine:
        assert_same_tokens(engine.generate(prompt, max_new_tokens=40), expected, margins)
    with engine_of(model, small_config(broadcast_delay=1)) as engine:
        tokens = engine.generate(prompt, max_new_tokens=40)
    with pytest.raises(AssertionError, match="whose lead"):
        assert_same_tokens(tokens, expected, margins)


def test_stop_ids_and_the_models_own_end(tmp_path):
    model = random_model(small_config(), seed=2)
    folder = write_folder(tmp_path, model)
    with Engine.from_pretrained(folder) as engine:
        tokens = engine.generate([1], max_new_tokens=30)
        position = next(i for i in range(5, 30) if tokens.index(tokens[i]) == i)  # a token's first appearance
        stop = tokens[position]
        assert engine.generate([1], max_new_tokens=30, stop_ids=[stop]) == tokens[: position + 1]
    with Engine.from_pretrained(write_folder(tmp_path, model, eos_token_id=[stop])) as engine:
        assert engine.eos_ids == (stop,)
        assert engine.generate([1], max_new_tokens=30) == tokens[: position + 1]
        assert engine.generate([1], max_new_tokens=30, ignore_eos=True) == tokens
