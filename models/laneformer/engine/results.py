"""What a request gives back beside token ids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GeneratedToken:
    """One new token; with the option `logprobs=n`, of the model's own distribution (before penalties, temperature):

    logprob: its log-probability. top: (id, log-probability) of the n likeliest ids, the likeliest first.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Statistics:
    """Of one request, all its sequences together.

    reused_tokens: prompt tokens whose keys and values were still there. passes: reads of all the weights.
    proposed_tokens: guesses of `speculate`; accepted_tokens: those that were right.
    """

    reused_tokens: int
    passes: int
    proposed_tokens: int
    accepted_tokens: int


@dataclass(frozen=True)
class Generation:
    """A finished request. finish_reason: "stop" (a stop id) or "length" (max_new_tokens, or the context is full)."""

    tokens: list[GeneratedToken]
    finish_reason: str
    prompt_tokens: int
    statistics: Statistics

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


@dataclass(frozen=True)
class PromptLogprobs:
    """Of the n scored ids of a prompt, each given all before it; the likeliest id is first in `top_ids`.

    logprobs: float32 (n,). top_ids: int32 (n, top). top_logprobs: float32 (n, top). is_greedy: bool (n,), whether the
    id is the one that greedy decoding would have chosen (the lowest of equally likely ones); it needs top >= 1.
    """

    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    is_greedy: np.ndarray
