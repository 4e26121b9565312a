"""Encode a row by a chat template: the ids that a server makes of the same request, and which are trained.

A row has "messages" ([{"role", "content"}, ...], as in the OpenAI API) or "conversations" ([{"from",
"value"}, ...], as ShareGPT). Whatever cannot be used has a reason of one word, by which it is counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from laneformer.chat import ASSISTANT, SYSTEM, TOOL, USER, ChatError
from laneformer.prompts import PromptEncoder

# where they are not those of OpenAI
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
Message = dict[str, Any]
# OpenAI's newer name of the system
DEVELOPER = "developer"
# fields of a row beside its messages, and those of a message: what the template does not show is counted
OF_ROW = ("system", "tools", "functions", "images", "audios", "videos")
OF_MESSAGE = ("role", "content", "from", "value", "weight", "train", "name", "id", "tool_calls")


class Conversation(NamedTuple):
    """An encoded row.

    Attributes:
        key: a 128-bit hash of roles, texts and tools.
        ids: uint32 (n,).
        loss_mask: bool (n,), which ids count as labels.
        cut: whether its end is missing.
        ignored: fields that the template does not show.
    """

    key: int
    ids: np.ndarray
    loss_mask: np.ndarray
    cut: bool = False
    ignored: frozenset[str] = frozenset()


def encode(
    row: Any, encoder: PromptEncoder, system_and_tools: bool, longest: int, cut: bool
) -> Conversation:
    """Encode one row with the encoder's template.

    Args:
        system_and_tools: whether the template has them; the published one has not.
        longest: most tokens.
        cut: keep the first exchanges of a conversation that is too long.

    Raises:
        ChatError: no server would be sent it or could answer, nothing is trained, or it is too long.
    """
    messages_of_row = read_messages(row)
    ignored = {name for name in OF_ROW if row.get(name)}
    for message in messages_of_row:
        if isinstance(message, Mapping) and message.get("role") == ASSISTANT:
            ignored |= {name for name, value in message.items() if value and name not in OF_MESSAGE}
    if system_and_tools:
        turns, tools = messages_of_row, _parse_tools(row.get("tools"))
        ignored -= {"system", "tools"}
    else:
        turns, tools = [message for message in messages_of_row if not _is_system(message)], []
        ignored |= {"system"} if len(turns) < len(messages_of_row) else set()
    messages = [
        _format_message(message, number, system_and_tools) for number, message in enumerate(turns)
    ]
    _check_order(messages)
    try:
        json.dumps([messages, tools], ensure_ascii=False).encode()
    except (UnicodeEncodeError, TypeError):
        # JSON can hold lone surrogates, Arrow dates and bytes
        raise ChatError(
            "content", "the conversation has a value that is no valid text or JSON"
        ) from None
    ids, answers = encoder.encode_training(messages, tools)
    replies = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
    loss_mask, fitting = np.zeros(len(ids), dtype=bool), (0, 0)
    for number, (begin, end) in zip(replies, answers, strict=True):
        loss_mask[begin:end] = _is_learned(turns[number], number)
        # a cut ends with an answer: a call without its result would be a conversation that no server has
        if end <= longest and "tool_calls" not in messages[number]:
            fitting = (end, number + 1)
    end, count = fitting if cut and len(ids) > longest else (len(ids), len(messages))
    if not 0 < end <= longest:
        raise ChatError("too_long", f"{len(ids)} tokens, the longest that fits has {longest}")
    if not loss_mask[:end].any():
        raise ChatError("no_reply", "no message of the assistant that is trained")
    # without ids of calls and fields like a name: the same words are a duplicate
    texts = [
        [
            message["role"],
            message["content"].strip(),
            *(call["function"] for call in message.get("tool_calls", ())),
        ]
        for message in messages[:count]
    ]
    key = xxhash.xxh3_128_intdigest(json.dumps(texts + tools).encode())
    array = np.array(ids[:end], dtype=np.uint32)
    return Conversation(key, array, loss_mask[:end], count < len(messages), frozenset(ignored))


def read_messages(row: Any) -> list[dict[str, Any]]:
    """Return a row's messages in OpenAI's form, each content one text."""
    if row is None:
        raise ChatError("not_json", "the line is not JSON")
    if isinstance(row, dict) and isinstance(row.get("messages"), list):
        messages = [_join_texts(message) for message in row["messages"]]
    elif isinstance(row, dict) and isinstance(turns := row.get("conversations"), list):
        if any(
            not isinstance(turn, dict) or not {"from", "value"} <= turn.keys() for turn in turns
        ):
            raise ChatError(
                "fields", "every turn of 'conversations' needs the fields 'from' and 'value'"
            )
        messages = [
            {
                **turn,
                "role": SHAREGPT_ROLES.get(str(turn["from"]), turn["from"]),
                "content": turn["value"],
            }
            for turn in turns
        ]
    else:
        raise ChatError("fields", "a row needs a list 'messages' or 'conversations'")
    # ShareGPT has the system message beside the turns
    if isinstance(system := row.get("system"), str) and system:
        messages.insert(0, {"role": SYSTEM, "content": system})
    return messages


def _join_texts(message: Any) -> Any:
    """Join the texts of a message's content as the server does."""
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, list):
        return message
    texts = [
        part.get("text", "")
        for part in parts
        if isinstance(part, dict) and part.get("type") == "text"
    ]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        # images and the like: left as they are, which `_format_message` refuses
        return message
    return {**message, "content": "\n".join(texts)}


def _is_system(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") in (SYSTEM, DEVELOPER)


def _is_learned(message: Message, number: int) -> bool:
    # unless "weight": 0 (OpenAI) or "train": false (axolotl)
    weight, train = message.get("weight"), message.get("train")
    if weight not in (None, 0, 1) or train not in (None, False, True):
        raise ChatError(
            "weight",
            f"message {number} has weight {weight!r} and train {train!r}; allowed are 0, 1, false and true",
        )
    return weight != 0 and train is not False


def _parse_json(value: Any) -> Any:
    """Parse JSON in a text; else return the value itself."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return None


def _parse_tools(value: Any) -> list[Any]:
    tools = _parse_json(value) if value else []
    listed = tools if isinstance(tools, list) else [None]
    functions = [tool.get("function") if isinstance(tool, dict) else None for tool in listed]
    if not all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in functions
    ):
        raise ChatError(
            "tools",
            f"tools are {value!r:.80}; they need the form [{{'type': 'function', 'function': {{'name': ...}}}}]",
        )
    return listed


def _format_message(message: Any, number: int, system_and_tools: bool) -> Message:
    """Write a message as a server gives it to a template."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise ChatError("fields", f"message {number} is {message!r:.80}; it needs the field 'role'")
    role, text = message["role"], message.get("content")
    role = SYSTEM if role == DEVELOPER else role
    roles = (SYSTEM, USER, ASSISTANT, TOOL) if system_and_tools else (SYSTEM, USER, ASSISTANT)
    if role not in roles:
        allowed = ", ".join(roles)
        raise ChatError("role", f"message {number} has the role {role!r}; allowed are {allowed}")
    if not isinstance(text, str | None):
        raise ChatError(
            "content", f"message {number} has content of type {type(text).__name__}; it needs text"
        )
    plain: Message = {"role": role, "content": text or ""}
    calls = message.get("tool_calls")
    if message.get("function_call") or (calls and not system_and_tools):
        fix = (
            "write it as 'tool_calls'"
            if system_and_tools
            else "give --system-and-tools, or leave the row out"
        )
        raise ChatError(
            "tools",
            f"message {number} calls a tool, which would be left out of what is trained; {fix}",
        )
    if calls:
        plain["tool_calls"] = [_format_call(call, number) for call in calls]
    if role == TOOL:
        plain["tool_call_id"] = message.get("tool_call_id")
    if calls and role != ASSISTANT:
        raise ChatError(
            "order", f"message {number}, the {role}'s, calls tools: only the assistant does"
        )
    if role in (USER, ASSISTANT) and not calls and not plain["content"].strip():
        raise ChatError("empty", f"message {number}, the {role}'s, is empty")
    return plain


def _format_call(call: Any, number: int) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    name, arguments = (
        function.get(key) if isinstance(function, Mapping) else None
        for key in ("name", "arguments")
    )
    arguments = _parse_json(arguments or "{}")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ChatError(
            "tools",
            f"message {number} has the call {call!r:.80}; it needs a function's name and arguments as JSON",
        )
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _check_order(messages: Sequence[Message]) -> None:
    """Refuse turns out of order: user and assistant in turn, the user first, each call with its result."""
    # in the order of the calls, as the template shows no ids; system messages anywhere
    expected, waiting = USER, list[Any]()
    for number, message in enumerate(messages):
        role = message["role"]
        if role == SYSTEM:
            continue
        if role != expected:
            raise ChatError(
                "order", f"message {number} is the {role}'s, but it is the {expected}'s turn"
            )
        if role == TOOL:
            call, answered = waiting.pop(0), message["tool_call_id"]
            if None not in (call, answered) and call != answered:
                raise ChatError(
                    "order",
                    f"message {number} is the result of {answered!r}, but that of {call!r} is next",
                )
        else:
            waiting = [call["id"] for call in message.get("tool_calls", ())]
        after = USER if role == ASSISTANT else ASSISTANT
        expected = TOOL if waiting else after
    if not any(message["role"] == USER for message in messages):
        raise ChatError("empty", "the conversation has no message of a user")
