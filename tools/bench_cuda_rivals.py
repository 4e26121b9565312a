"""Transformers on the same GPU: its own generate(), and a static cache under torch.compile."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from laneformer import LaneformerConfig
from tools.check_reference import Weights, hf_model

Turn = Callable[[int], float]  # new tokens -> tokens/s


def eager(config: LaneformerConfig, weights: Weights) -> Turn:
    """generate() as it comes: a growing cache, no compilation."""
    model: Any = hf_model(config, weights, torch.bfloat16)
    ids = torch.tensor([[5]], device=model.device)

    def turn(tokens: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens,
            pad_token_id=0,
        )  # fmt: skip
        torch.cuda.synchronize()
        return tokens / (time.perf_counter() - start)

    return turn


def static(config: LaneformerConfig, weights: Weights, mode: str, length: int) -> Turn:
    """A greedy loop over the compiled forward with a static cache of `length`; the first turn compiles.

    Mode "reduce-overhead" replays CUDA graphs, "max-autotune" also tries kernels.
    """
    from transformers import StaticCache

    model = hf_model(config, weights, torch.bfloat16)
    forward: Any = torch.compile(model.forward, mode=mode)
    cache = StaticCache(config=model.config, max_cache_len=length)

    @torch.inference_mode()
    def turn(tokens: int) -> float:
        assert tokens < length, f"{tokens} tokens do not fit in a cache of {length}"
        cache.reset()
        token = torch.tensor([[5]], device=model.device)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(tokens):
            torch.compiler.cudagraph_mark_step_begin()
            logits = forward(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            token = logits[:, -1].argmax(-1, keepdim=True).clone()
            token.item()  # read back, as a sampler would
        return tokens / (time.perf_counter() - start)

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
