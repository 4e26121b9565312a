"""Reasoning: what a model writes between <think> and </think> before its answer."""

from __future__ import annotations

from ..engine.text import StopStrings

BEGIN, END = "<think>", "</think>"


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
