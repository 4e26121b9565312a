"""Conversations in a Laneformer's own chat template, as token ids for training; prompts.py renders any model's.

Every message is a role header, its content without surrounding white space, and the token that ends a text. Ids
are made segment by segment and put in a row, so no merge crosses a boundary and each id is either trained or
not. The exported chat_template.jinja gives the same ids, with one exception: there a message that spells "</s>"
ends its turn, in `render` text stays text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
_HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"


class Segment(NamedTuple):
    """Token ids in a row; `trained`: whether the model learns to write them."""

    ids: list[int]
    trained: bool


class ChatError(ValueError):
    """A conversation that the template has no form for; `reason` is one word, to count by."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


class ChatTokenizer:
    """A folder's tokenizer for which text is only text: what spells a control token becomes ordinary pieces."""

    def __init__(self, tokenizer: Tokenizer, eos_id: int):
        """ValueError for a tokenizer with pieces across a line break, where ids of
        segments depend on neighbours.

        eos_id: what ends a message.
        """
        crossing = [piece for piece in tokenizer.get_vocab() if "\n" in piece and piece.strip("\n")]
        if crossing:
            raise ValueError(
                f"the tokenizer has {len(crossing)} pieces that join a line break and text, such as {crossing[0]!r}; "
                "a message could not be told from its header. Use a tokenizer trained line by line, as Llama-2's"
            )
        self._tokenizer = Tokenizer.from_str(
            tokenizer.to_str()
        )  # a copy: the mode is for all threads of an object
        self.eos_id = eos_id
        # the parts of a header are single tokens where the vocabulary has such (Llama 3)
        self.headers = {role: self._encode(_HEADER.format(role)) for role in (USER, ASSISTANT)}
        together = {text: self._encode(_HEADER.format(USER) + text) for text in ("Hi", "1", "(a", "é", "東")}
        self._tokenizer.encode_special_tokens = True
        self._line_break_ids = len(self._encode("\n"))
        for text, ids in together.items():
            if ids != [*self.headers[USER], *self.content(text)]:
                raise ValueError(
                    f"the tokenizer gives {text!r} behind the header of a message other ids than alone, so a message "
                    "could not be told from its header. Use one whose pre-tokenizer keeps line breaks apart (Llama 3, "
                    "Qwen 2), or that is trained line by line (Llama 2)"
                )

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def content(self, text: str) -> list[int]:
        """The ids of a text that follows a header: without the space that opens a text of its own."""
        return self._encode("\n" + text)[self._line_break_ids :]


def render(
    messages: Sequence[Mapping[str, Any]], tokenizer: ChatTokenizer, add_generation_prompt: bool = False
) -> list[Segment]:
    """The segments of a conversation, [{"role": ..., "content": ...}, ...]; assistants' contents
    and </s> are trained, but those of messages with "weight": 0 (OpenAI) or "train": false (axolotl).

    add_generation_prompt: end with the header of the reply. Raises ChatError unless user and
    assistant take turns, the user first, and every message has text; system messages are ignored, as
    in the published template.
    """
    segments: list[Segment] = []
    expected = USER
    for number, message in enumerate(messages):
        role, text = check_message(message, number, expected)
        if role == SYSTEM:
            continue
        expected = USER if role == ASSISTANT else ASSISTANT
        segments.append(Segment(tokenizer.headers[role], False))
        trained = role == ASSISTANT and is_wanted(message, number)
        segments.append(Segment([*tokenizer.content(text), tokenizer.eos_id], trained))
    if not segments:
        raise ChatError("empty", "the conversation has no message of a user")
    if add_generation_prompt:
        if expected == USER:
            raise ChatError(
                "order", f"the last of {len(messages)} messages is the assistant's: nothing to reply to"
            )
        segments.append(Segment(tokenizer.headers[ASSISTANT], False))
    return segments


def token_ids(segments: Sequence[Segment]) -> list[int]:
    return [token for segment in segments for token in segment.ids]


def check_message(message: Mapping[str, Any], number: int, expected: str) -> tuple[str, str]:
    """Role and stripped text of a message. ChatError where the template has no form for it."""
    if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
        raise ChatError(
            "fields", f"message {number} is {message!r:.80}; it needs the fields 'role' and 'content'"
        )
    role, text = message["role"], message["content"]
    if role not in (SYSTEM, USER, ASSISTANT):
        raise ChatError(
            "role", f"message {number} has the role {role!r}; allowed are system, user and assistant"
        )
    if (
        not isinstance(text, str) or text.encode(errors="ignore").decode() != text
    ):  # JSON can hold lone surrogates
        raise ChatError(
            "content", f"message {number} has content of type {type(text).__name__}; it needs valid text"
        )
    if role == SYSTEM:
        return role, text
    if role != expected:
        raise ChatError(
            "order", f"message {number} is the {role}'s, but it is the {expected}'s turn; user comes first"
        )
    if not (text := text.strip()):
        raise ChatError("empty", f"message {number}, the {role}'s, is empty")
    return role, text


def is_wanted(message: Mapping[str, Any], number: int) -> bool:
    """Whether an assistant's message is to be learned. ChatError for a weight between."""
    weight, train = (
        message.get("weight"),
        message.get("train"),
    )  # a column of Parquet holds None where a row has none
    if weight not in (None, 0, 1) or train not in (None, False, True):
        raise ChatError(
            "weight",
            f"message {number} has weight {weight!r} and train {train!r}; allowed are 0, 1, false and true",
        )
    return weight != 0 and train is not False
