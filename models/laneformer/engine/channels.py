"""What a model says, as it comes: its reasoning and its answer, without the marks between them.

Two formats are known: reasoning between <think> and </think>, and OpenAI's harmony, which gpt-oss writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .text import StopStrings

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BEGIN, END = "<think>", "</think>"
PROMPT_END_TOKENS = 8  # among them is that <think>
# of harmony: https://developers.openai.com/cookbook/articles/openai-harmony
START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = "<|end|>", "<|call|>", "<|return|>"
NEXT = f"{ENDS[0]}{START}assistant"  # another message of the same answer
FUNCTIONS = "functions."
ANSWER = f"{CHANNEL}final{MESSAGE}"
CALL = f"{CHANNEL}commentary to={FUNCTIONS}", f" {CONSTRAIN}json{MESSAGE}"  # around a function's name


def speaks_harmony(tokenizer_config: Mapping[str, Any]) -> bool:
    """Whether the model's chat template is of that format."""
    return f"{CHANNEL}analysis" in str(tokenizer_config.get("chat_template"))


def begun(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Whether the prompt ends in a <think>, with which a template opens the answer."""
    return tokenizer.decode(prompt[-PROMPT_END_TOKENS:], skip_special_tokens=False).rstrip().endswith(BEGIN)


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


class Harmony:
    """The text of one answer in harmony, control tokens spelled out, in any pieces, as reasoning and content.

    An answer is messages, HEADER<|message|>TEXT<|end|>, whose header names a channel, and in "to=" who is
    spoken to. Reasoning is the channel analysis, and what is for nobody that is known here; the others are
    content. calls: a message to functions.NAME is content, spelled `CALL[0] NAME CALL[1] ARGUMENTS`,
    however its header is; else it is reasoning. Text without any header is content.
    """

    def __init__(self, calls: bool = False):
        self.inside = False  # a message of reasoning
        self._calls, self._header = calls, ""
        self._stops: StopStrings = StopStrings(MESSAGE)
        self._in_header = True
        self._spoke: set[bool] = set()  # kinds that have a message already
        self._said = {True: "", False: ""}  # by whether it is reasoning

    def push(self, text: str) -> tuple[str, str]:
        """Reasoning and content that are certainly new."""
        rest: str | None = text
        while rest is not None:
            rest = self._read_header(rest) if self._in_header else self._read_text(rest)
        return self._new()

    def finish(self) -> tuple[str, str]:
        """What was held back for a control token that never came; the beginning of a header is no text."""
        if not self._in_header:
            self._said[self.inside] += self._stops.finish()
        elif not (held := self._header + self._stops.held).lstrip().startswith(("<|", "to=")):
            self._said[False] += held
        return self._new()

    def _new(self) -> tuple[str, str]:
        said, self._said = self._said, {True: "", False: ""}
        return said[True], said[False]

    def _read_header(self, text: str) -> str | None:
        """What follows the header; None where it has not ended."""
        self._header += self._stops.push(text)
        if self._stops.found:
            rest = self._stops.held.removeprefix(MESSAGE)
            self._begin(self._header)
            return rest
        held = self._header + self._stops.held
        if any(held.lstrip().startswith(mark) or mark.startswith(held.lstrip()) for mark in ("<|", "to=")):
            return None
        self._begin("")
        return held

    def _begin(self, header: str) -> None:
        """The text of a message."""
        channel = re.search(re.escape(CHANNEL) + r"\s*(\w+)", header)
        spoken_to = re.search(r"\bto=([^\s<]+)", header)
        name = spoken_to[1] if spoken_to else ""
        called = self._calls and name.startswith(FUNCTIONS)
        self.inside = not called and bool(name or (channel and channel[1] == "analysis"))
        if called:
            self._said[False] += name.removeprefix(FUNCTIONS).join(CALL)
        elif self.inside in self._spoke:
            self._said[self.inside] += "\n\n"
        self._spoke |= set() if called else {self.inside}
        self._in_header, self._header = False, ""
        self._stops = StopStrings([*ENDS, START, CHANNEL, CONSTRAIN, MESSAGE])

    def _read_text(self, text: str) -> str | None:
        """What follows the message, with the mark that begins the next one."""
        self._said[self.inside] += self._stops.push(text)
        if (mark := self._stops.found) is None:
            return None
        rest = self._stops.held.removeprefix(mark)
        if mark == MESSAGE:  # a second one: the text goes on
            self._stops = StopStrings(self._stops.stops)
            return rest
        self.inside, self._in_header, self._stops = False, True, StopStrings(MESSAGE)
        return rest if mark in ENDS else mark + rest
