"""Reasoning: what a model writes between <think> and </think> before its answer, and how long it may be."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..engine.text import StopStrings, TextStream
from .scheduler import Grammar

BEGIN, END = "<think>", "</think>"
ENDING = f"\n{END}\n\n"  # where there is no budget left
UNLIMITED = -1


class Thinking:
    """The text of one answer, in any pieces, as reasoning and content, without the tags.

    inside: the prompt has opened the reasoning already. White space around the tags belongs to neither.
    """

    def __init__(self, inside: bool):
        self.inside = inside
        self._held = ""  # may be the beginning of <think>, or white space before </think>
        self._begun, self._spoke, self._after = inside, False, False
        self._stops = StopStrings(END)

    def push(self, text: str) -> tuple[str, str]:
        """Reasoning and content that are certainly new."""
        if not self._begun:
            self._held += text
            opened = self._held.lstrip()
            if opened.startswith(BEGIN):
                self.inside, self._held, text = True, "", opened.removeprefix(BEGIN)
            elif BEGIN.startswith(opened):
                return "", ""
            else:
                text, self._held = self._held, ""
            self._begun = True
        return self._inside(text) if self.inside else ("", self._content(text))

    def finish(self) -> tuple[str, str]:
        """What was held back for a tag that never came."""
        if self.inside:
            return self._reasoning(self._stops.finish(), last=True), ""
        held, self._held = self._held, ""
        return "", held

    def _inside(self, text: str) -> tuple[str, str]:
        said = self._reasoning(self._stops.push(text), self._stops.found is not None)
        if self._stops.found is None:
            return said, ""
        self.inside, self._after = False, True
        return said, self._content(self._stops.held.removeprefix(END))

    def _reasoning(self, text: str, last: bool) -> str:
        """Without white space at both ends."""
        text = self._held + text
        text = text if self._spoke else text.lstrip()
        said = text.rstrip()
        self._spoke |= bool(said)
        self._held = "" if last else text[len(said) :]
        return said

    def _content(self, text: str) -> str:
        """Without the white space that follows reasoning."""
        if self._after:
            text = text.lstrip()
            self._after = not text
        return text


class Budget:
    """A grammar that ends a reasoning after `tokens` tokens: then the next ids are `ending`, the end tag's. Before and
    after, any id may come, or those of `grammar`.

    inside: as of `Thinking`. stream: makes one for the text of the new tokens.
    """

    def __init__(
        self, tokens: int, inside: bool, ending: list[int], stream: Callable[[], TextStream], vocab_size: int,
        grammar: Grammar | None,
    ):  # fmt: skip
        self._given = tokens, inside, ending, stream, vocab_size, grammar
        self._tokens, self._left, self._ended = tokens, [*ending], False
        self._thinking, self._stream, self._grammar = Thinking(inside), stream(), grammar and grammar.copy()
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
