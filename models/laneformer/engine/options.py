"""What a caller may ask of one generation, checked in one place."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class GenerationOptions:
    """Options of `Engine.generate` and `Engine.stream`; invalid values raise ValueError.

    max_new_tokens: at most so many; generation also ends where the context is full.
    temperature: 0 is greedy (the lowest id wins a tie). Then in this order: top_k (0: off), top_p (the fewest likely
    tokens that reach this probability), min_p (tokens at least so many times as likely as the likeliest).
    seed: same seed and prompt give the same tokens, for any number of threads.
    stop_ids: end after one of these, which is returned as the last token; the model's own end-of-text ids are added
    unless ignore_eos.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self._check_range("max_new_tokens", int, 1, 2**31 - 1)
        self._check_range("temperature", float, 0.0, 1e6)
        self._check_range("top_k", int, 0, 2**31 - 1)
        self._check_range("top_p", float, 0.0, 1.0)
        self._check_range("min_p", float, 0.0, 1.0)
        self._check_range("seed", int, 0, 2**64 - 1)
        if self.top_p == 0.0:
            raise ValueError("top_p = 0 would leave no token; use a value above 0, or temperature = 0 for greedy")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos = {self.ignore_eos!r} must be True or False")

    def _check_range(self, name: str, kind: type, low: float, high: float) -> None:
        value = getattr(self, name)
        allowed = (int, np.integer) if kind is int else (int, float, np.integer, np.floating)
        if isinstance(value, bool) or not isinstance(value, allowed) or not math.isfinite(value):
            raise ValueError(f"{name} = {value!r} must be {'an integer' if kind is int else 'a finite number'}")
        if not low <= value <= high:
            raise ValueError(f"{name} = {value!r} is outside {low} to {high}")
        object.__setattr__(self, name, kind(value))

    @classmethod
    def from_kwargs(cls, options: dict[str, Any]) -> GenerationOptions:
        """Options by name; an unknown one is refused with the nearest that exists."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {known}"
                raise ValueError(f"unknown option {name!r}; {hint}")
        return cls(**options)


def checked_ids(ids: Any, vocab_size: int, what: str) -> list[int]:
    """Token ids as a list of Python ints, each in 0 .. vocab_size - 1, else ValueError."""
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{what} must be a flat sequence of integers, not {type(ids).__name__} of shape {array.shape}")
    bad = array[(array < 0) | (array >= vocab_size)] if array.size else array
    if bad.size:
        raise ValueError(f"{what} holds {int(bad[0])}, outside the vocabulary of 0 to {vocab_size - 1}")
    return [int(i) for i in array]
