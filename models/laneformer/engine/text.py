"""Decode a stream of tokens to text, in whole characters and up to a stop string."""

from __future__ import annotations

import codecs
import contextlib
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTEXT_TOKENS = 6  # of the prompt, decoded with the first piece
LONGEST_BYTES = 8  # to look at: the character before the unfinished one shows where that begins
LONGEST_UNFINISHED = 3  # bytes of a UTF-8 character without its last one, so at most as many tokens


class TextStream:
    """Decode tokens piece by piece; text is held back while it ends in an unfinished UTF-8 sequence."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True
    ):
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self.ids = list(prompt_ids)
        self.start = max(0, len(self.ids) - CONTEXT_TOKENS)
        self.shown = len(self.ids)

    def push(self, token: int) -> str:
        self.ids.append(token)
        end = len(self.ids)
        if self._decode(end).endswith("\ufffd"):
            end -= self._count_unfinished()
        return self._piece(end) if end > self.shown else ""

    def finish(self) -> str:
        """Return the text held back, with unfinished characters replaced."""
        return self._piece(len(self.ids))

    def _count_unfinished(self) -> int:
        # tokens at the end that may still become a character; older ones cannot
        names = [self.tokenizer.id_to_token(token) or "" for token in self.ids[-LONGEST_BYTES:]]
        byte_matches = [re.fullmatch("<0x([0-9A-F]{2})>", name) for name in names]
        if byte_matches[-1] is None:
            return LONGEST_UNFINISHED
        # byte tokens: one that ends a literal U+FFFD leaves nothing to wait for
        last = [int(byte[1], 16) for byte in byte_matches[-1 : -len(byte_matches) - 1 : -1] if byte]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(bytes(last[::-1]))
        return len(decoder.getstate()[0])

    def _piece(self, end: int) -> str:
        # decoding depends on the neighbours (a leading space, bytes that form one character), so a
        # piece is the difference of two decodings that start at the same token
        text_before, text_now = self._decode(self.shown), self._decode(end)
        if len(text_now) > len(text_before):
            self.start, self.shown = self.shown, end
        return text_now[len(text_before) :]

    def _decode(self, end: int) -> str:
        return self.tokenizer.decode(self.ids[self.start : end], self.skip_special_tokens)


class StopStrings:
    """Cut text at the first complete stop string, however the text comes in pieces.

    The end of the text is held back while it may begin a stop string.
    """

    def __init__(self, stops: str | Iterable[str]):
        try:
            self.stops = [stops] if isinstance(stops, str) else list(stops)
        except TypeError:
            raise ValueError(f"stop = {stops!r} must be a text or a list of texts") from None
        for stop in self.stops:
            if not isinstance(stop, str) or not stop:
                raise ValueError(
                    f"stop holds {stop!r}; a stop string is a text of at least one character"
                )
        self.found: str | None = None
        self.held = ""

    def push(self, text: str) -> str:
        """Return the new part of the text that is certainly before any stop string."""
        self.held += text
        places = [(self.held.find(stop), stop) for stop in self.stops]
        # the stop string that is complete first counts, not the one that begins first
        ends = [(place + len(stop), place, stop) for place, stop in places if place >= 0]
        if ends:
            _, end, self.found = min(ends)
        else:
            end = len(self.held) - max((self._count_begun(stop) for stop in self.stops), default=0)
        out, self.held = self.held[:end], self.held[end:]
        return out

    def finish(self) -> str:
        """Return the text held back; empty when a stop string was found."""
        rest, self.held = self.held, ""
        return "" if self.found else rest

    def _count_begun(self, stop: str) -> int:
        # length of the longest end of the held text that begins this stop string
        longest = min(len(stop) - 1, len(self.held))
        return next((n for n in range(longest, 0, -1) if stop.startswith(self.held[-n:])), 0)


class Tokens(Iterator[int], Protocol):
    """Token ids of a running request, which `close` ends."""

    def close(self) -> None: ...


def text_of(tokens: Tokens, text: TextStream, stops: StopStrings) -> Generator[str, None, None]:
    """Yield pieces of text; close `tokens` once a stop string is complete."""
    with contextlib.closing(tokens):
        for token in tokens:
            piece = stops.push(text.push(token))
            if piece:
                yield piece
            if stops.found:
                return
        rest = stops.push(text.finish()) + stops.finish()
        if rest:
            yield rest
