"""Parse a model's streamed answer into reasoning, text and tool calls.

Formats: `<think>REASONING</think>TEXT` with calls in the form of the chat template (`CallForm`), and OpenAI's
harmony (gpt-oss): https://developers.openai.com/cookbook/articles/openai-harmony

serve/tool_calls.py finds a model's `CallForm` in its template and forces it by a grammar; serve/conversation.py
makes blocks of the deltas.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .text import StopStrings

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BEGIN, END = "<think>", "</think>"
PROMPT_END_TOKENS = 8  # enough to contain a <think> at the prompt's end
START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = "<|end|>", "<|call|>", "<|return|>"
NEXT = f"{ENDS[0]}{START}assistant"  # another message of the same answer
FUNCTIONS = "functions."
ANSWER = f"{CHANNEL}final{MESSAGE}"
HEADER_BEGINS = "<|", "to="
# private-use characters for what the model chooses within a CallForm: a call's id, or its number
CALL_ID, CALL_NUMBER = "\ue000", "\ue001"
CHOSEN = f"[{CALL_ID}{CALL_NUMBER}]"
OBJECT = json.JSONDecoder(parse_int=str, parse_float=str)  # numbers of any length


class Delta(NamedTuple):
    """New text of an answer, of one kind."""

    # "reasoning", "text", "id" (of the next call, where the model writes one), "call" (one begins:
    # text is the function's name) or "arguments" (of that call)
    kind: str
    text: str


@dataclass(frozen=True)
class CallForm:
    """The syntax of calls: begin NAME middle ARGUMENTS (between NAME middle ARGUMENTS)* end."""

    # CALL_ID and CALL_NUMBER within these mark the places of the call's id and number
    begin: str
    middle: str
    # None where the model makes one call at a time
    between: str | None
    end: str
    # the template takes arguments as a string of JSON
    as_text: bool = False

    @property
    def marker(self) -> str:
        """The text that begins a call and nothing else."""
        # "{" begins a call only at the start of an answer
        if self.begin[0] == "{":
            return "{"
        first_word = re.match(rf"<[^<>\s]*>|.[^\s{{\[{CALL_ID}{CALL_NUMBER}]*", self.begin)
        return first_word[0] if first_word else self.begin

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str:
        texts = [
            f"{call['name']}{self.middle}{json.dumps(call['arguments'], ensure_ascii=False)}"
            for call in calls
        ]
        return self.begin + (self.between or "").join(texts) + self.end


HERMES = CallForm(
    '<tool_call>\n{"name": "',
    '", "arguments": ',
    '}\n</tool_call>\n<tool_call>\n{"name": "',
    "}\n</tool_call>",
)
HARMONY = CallForm(
    f"{CHANNEL}commentary to={FUNCTIONS}", f" {CONSTRAIN}json{MESSAGE}", None, ENDS[1]
)


def speaks_harmony(tokenizer_config: Mapping[str, Any]) -> bool:
    """Return whether the chat template uses the harmony format."""
    return f"{CHANNEL}analysis" in str(tokenizer_config.get("chat_template"))


def begins_reasoning(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Return whether the prompt ends in a <think>."""
    # some templates open the answer with it
    end = tokenizer.decode(prompt[-PROMPT_END_TOKENS:], skip_special_tokens=False)
    return end.rstrip().endswith(BEGIN)


class AnswerReader:
    """Split the text of one answer, pushed in any pieces, into deltas without the marks between them."""

    # after a form's marker only calls in that form can follow: a grammar guarantees it;
    # white space around <think> and </think> is dropped

    def __init__(self, calls: CallForm | None = None, inside: bool = False, harmony: bool = False):
        # within the reasoning, which the prompt may have opened already
        self.inside = inside
        self._calls = calls
        self._unread, self._ended = "", False  # unread text, and whether no more will come
        self._choice = ""  # the id or number in the last mark
        self._deltas: list[Delta] = []
        self._reading = self._read_harmony() if harmony else self._read_answer()

    def push(self, text: str) -> list[Delta]:
        """Return the deltas that no later text can change."""
        self._unread += text
        next(self._reading, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self) -> list[Delta]:
        """Return what was held back for a mark that never came."""
        self._ended = True
        return self.push("")

    # Each `yield` of these generators waits for more text, or its end.

    def _read_answer(self) -> Generator[None, None, None]:
        opened = self._unread.lstrip()
        while not self.inside and BEGIN.startswith(opened) and opened != BEGIN and not self._ended:
            yield
            opened = self._unread.lstrip()
        if not self.inside and opened.startswith(BEGIN):
            self.inside, self._unread = True, opened.removeprefix(BEGIN)
        if self.inside:
            yield from self._pass_on("reasoning", [END], stripped=True)
            self.inside = False
            while not self._unread.strip() and not self._ended:
                yield
            self._unread = self._unread.lstrip()
        if self._calls is None:
            yield from self._pass_on("text", [])
        else:
            yield from self._read_calls(self._calls)

    def _read_calls(self, form: CallForm) -> Generator[None, None, None]:
        while not self._unread and not self._ended:
            yield
        only_text = form.marker == "{" and not self._unread.startswith("{")
        if (yield from self._pass_on("text", [] if only_text else [form.marker])) is None:
            return
        self._unread = form.marker + self._unread
        begin: str | None = form.begin
        while begin is not None and (yield from self._take_until(begin)) is not None:
            name = yield from self._take_until(form.middle)
            if name is None:
                return
            chosen, self._choice = self._choice, ""
            counts = chosen and CALL_NUMBER in form.begin + form.middle
            self._add("id", f"{FUNCTIONS}{name}:{chosen}" if counts else chosen)
            self._add("call", name)
            yield from self._read_arguments()
            begin = form.between

    def _read_arguments(self) -> Generator[None, None, None]:
        arguments = ""  # JSON, up to the end of its object
        while True:
            place, end = len(arguments), None
            arguments += self._unread
            if "}" in self._unread:
                with contextlib.suppress(ValueError):  # not complete yet
                    end = OBJECT.raw_decode(arguments)[1]
            self._add("arguments", arguments[place:end])
            self._unread = "" if end is None else arguments[end:]
            if end is not None or self._ended:
                return
            yield

    def _read_harmony(self) -> Generator[None, None, None]:
        # messages: HEADER<|message|>TEXT<|end|>; what has no header is text
        kinds: set[str] = set()  # of the messages so far
        while True:
            while self._may_begin_header() and MESSAGE not in self._unread and not self._ended:
                yield
            header = ""
            if self._unread.lstrip().startswith(HEADER_BEGINS):
                if MESSAGE not in self._unread:
                    return  # the beginning of a header is no text
                header, _, self._unread = self._unread.partition(MESSAGE)
            elif self._ended:
                return self._add("text", self._unread)
            kind = self._begin_message(header)
            if kind in kinds:
                self._add(kind, "\n\n")
            kinds |= {kind} - {"arguments"}
            mark: str | None = MESSAGE
            while mark == MESSAGE:  # a second one: the text goes on
                mark = yield from self._pass_on(kind, [*ENDS, START, CHANNEL, CONSTRAIN, MESSAGE])
            if mark is None:
                return
            self.inside = False
            self._unread = self._unread if mark in ENDS else mark + self._unread

    def _begin_message(self, header: str) -> str:
        # a header names a channel, and in "to=" a recipient
        channel = re.search(re.escape(CHANNEL) + r"\s*(\w+)", header)
        recipient = re.search(r"\bto=([^\s<]+)", header)
        name = recipient[1] if recipient else ""
        if self._calls is not None and name.startswith(FUNCTIONS):
            self._add("call", name.removeprefix(FUNCTIONS))
            return "arguments"
        # messages to an unknown recipient are shown as reasoning, like the channel analysis
        self.inside = bool(name or (channel and channel[1] == "analysis"))
        return "reasoning" if self.inside else "text"

    def _may_begin_header(self) -> bool:
        pending = self._unread.lstrip()
        return any(
            pending.startswith(begin) or begin.startswith(pending) for begin in HEADER_BEGINS
        )

    def _take_until(self, mark: str) -> Generator[None, None, str | None]:
        # the text before a mark, None where the answer ends first
        texts = []
        for part in re.split(CHOSEN, mark):
            # an empty last part: what was chosen ends where the arguments begin
            end = part or "{"
            while end not in self._unread:
                if self._ended:
                    return None
                yield
            place = self._unread.index(end)
            texts.append(self._unread[:place])
            self._unread = self._unread[place + len(part) :]
        # the id or number that the model chose within the mark
        self._choice = "".join(texts[1:]) or self._choice
        return texts[0]

    def _pass_on(
        self, kind: str, marks: Sequence[str], stripped: bool = False
    ) -> Generator[None, None, str | None]:
        """Add text up to one of the marks; return that mark, None at the answer's end."""
        stops, space, begun = StopStrings(marks), "", False
        while True:
            text = space + stops.push(self._unread)
            self._unread = stops.held.removeprefix(stops.found) if stops.found else ""
            if self._ended:
                text += stops.finish()
            if stripped:
                # trailing space waits: it counts only if more text follows
                text = text if begun else text.lstrip()
                space = text[len(text.rstrip()) :]
                text = text.rstrip()
            begun = begun or bool(text)
            self._add(kind, text)
            if stops.found or self._ended:
                return stops.found
            yield

    def _add(self, kind: str, text: str) -> None:
        if text or kind == "call":
            self._deltas.append(Delta(kind, text))
