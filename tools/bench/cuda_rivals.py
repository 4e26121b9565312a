"""Transformers on the same GPU: its own generate(), and a static cache under torch.compile."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import CompileConfig

from laneformer import LaneformerConfig
from tools.check.reference import Weights, hf_model

Turn = Callable[[int], float]  # new tokens -> tokens/s


def eager(config: LaneformerConfig, weights: Weights) -> Turn:
    """generate() as it comes: a growing cache, no compilation."""
    return generating(hf_model(config, weights, torch.bfloat16))


def static(config: LaneformerConfig, weights: Weights, mode: str) -> Turn:
    """generate() with a static cache, whose steps Transformers then compiles (on GPUs); the first turn does that.

    Mode "reduce-overhead" replays CUDA graphs, "max-autotune" also tries kernels.
    """
    compiled = CompileConfig(mode=mode, fullgraph=False)
    return generating(hf_model(config, weights, torch.bfloat16), cache_implementation="static", compile_config=compiled)


def generating(model: Any, **options: Any) -> Turn:
    ids = torch.tensor([[5]], device=model.device)
    asked = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, **options}

    def turn(tokens: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        made = model.generate(ids, min_new_tokens=tokens, max_new_tokens=tokens, **asked)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        assert made.shape[1] == tokens + 1, f"{made.shape[1] - 1} tokens instead of {tokens}"
        return tokens / seconds

    return turn


def later(make: Callable[[], Turn]) -> Turn:
    """A contestant that is made at its first turn, so that it can fail alone."""
    made = functools.cache(make)
    return lambda tokens: made()(tokens)


def alternate(turns: dict[str, Turn], rounds: int, tokens: int, time_left: Callable[[], float]) -> dict[str, Any]:
    """Tokens/s of everyone in every round, in alternating order; a contestant that fails drops out with its reason."""
    speeds: dict[str, list[float]] = {name: [] for name in turns}
    failed: dict[str, str] = {}

    def take(name: str) -> float | None:
        try:
            return turns[name](tokens)
        except Exception as error:  # whatever a rival raises is its result
            failed[name] = f"{type(error).__name__}: {str(error)[:500]}"
            return None

    for name in turns:
        take(name)  # warm-up
    longest = 0.0
    for index in range(rounds):
        if time_left() < longest:
            break
        start = time.monotonic()
        for name in list(turns)[:: -1 if index % 2 else 1]:
            if name not in failed and (speed := take(name)) is not None:
                speeds[name].append(speed)
        longest = max(longest, time.monotonic() - start)
    return {"tokens": tokens, "tokens_per_s": {n: s for n, s in speeds.items() if s}, "failed": failed}
