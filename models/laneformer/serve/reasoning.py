"""How long a model may reason before its answer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..engine.channels import END, Harmony, Thinking
from ..engine.text import TextStream
from .scheduler import Grammar

ENDING = f"\n{END}\n\n"  # where there is no budget left
UNLIMITED = -1


class Budget:
    """A grammar that ends a reasoning after `tokens` tokens: then the next ids are `ending`, the end tag's. Before and
    after, any id may come, or those of `grammar`.

    thinking, stream: make those of an answer.
    """

    def __init__(
        self, tokens: int, thinking: Callable[[], Thinking | Harmony], ending: list[int],
        stream: Callable[[], TextStream], vocab_size: int, grammar: Grammar | None,
    ):  # fmt: skip
        self._given = tokens, thinking, ending, stream, vocab_size, grammar
        self._tokens, self._left, self._ended = tokens, [*ending], False
        self._thinking, self._stream, self._grammar = thinking(), stream(), grammar and grammar.copy()
        self._any = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
        self._any[-1] >>= np.uint32(-vocab_size % 32)

    def copy(self) -> Budget:
        return Budget(*self._given)

    def mask(self, index: int) -> np.ndarray:
        self._ended |= self._thinking.inside and index >= self._tokens
        if not (self._ended and self._left):
            return self._grammar.mask(index) if self._grammar else self._any
        only = np.zeros_like(self._any)
        only[self._left[0] // 32] = np.uint32(1 << self._left[0] % 32)
        return only

    def accept(self, token_id: int) -> None:
        if self._grammar:
            self._grammar.accept(token_id)
        if self._ended:
            self._left = self._left[1:]
        else:
            self._thinking.push(self._stream.push(token_id))
