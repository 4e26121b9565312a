"""/v1/messages and /v1/messages/count_tokens: Anthropic's form of a conversation."""

from __future__ import annotations

import json
import uuid
from typing import Annotated, Any, Literal

from pydantic import Field

from ...chat import ASSISTANT, SYSTEM, USER
from ..bodies import Body, RequestError
from ..context import ServingContext
from ..conversation import Block, prepare_prompt
from ..parts import Effort, Objects, ResponseFormat, Thinking, parse_arguments
from ..schema import MAX_MESSAGES
from ..sending import ClientError
from .blocks import (
    BlockAnswer,
    TranslatedRequest,
    make_call,
    read_text,
    select_tools,
    translate_tool,
    write_event,
)

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class Turn(Body):
    place = "messages[]."
    is_open = True

    role: Literal["user", "assistant", "system"]
    content: str | Objects


class ToolUseChoice(Body):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputConfig(Body):
    effort: Effort | None = None
    format: ResponseFormat = ResponseFormat()


class MessagesRequest(TranslatedRequest):
    aliases = {**TranslatedRequest.aliases, "stop_sequences": "stop"}
    api_names = {
        r"^messages\S*": "messages",
        r"^(tools\S*?)\.function\.parameters": r"\1.input_schema",
        r"^(tools\S*?|tool_choice)\.function": r"\1",
        r"^response_format": "output_config.format",
    }

    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    output_config: OutputConfig = OutputConfig()
    system: str | Objects | None = None
    tools: Annotated[Objects, select_tools("custom")] = []
    tool_choice: ToolUseChoice = ToolUseChoice()
    thinking: Thinking = Thinking()

    def translate_fields(self) -> dict[str, Any]:
        system = read_text(self.system, ["text"], "system")
        messages = [{"role": SYSTEM, "content": system}] if system else []
        for turn in self.messages:
            messages += translate_turn(turn)
        continues = self.messages[-1].role == ASSISTANT
        if continues:
            check_final(self.messages[-1])
            if self.output_config.format.type != "text":
                reason = "the final assistant message, which the answer continues, cannot be combined with a format"
                raise RequestError(reason, "output_config.format")
            # There is nothing to continue, so the template opens a new turn
            if not messages[-1]["content"]:  # it is begun
                messages.pop()
                continues = False
        choice = self.tool_choice
        named_choice = {"type": "function", "function": {"name": choice.name}}
        return {
            "messages": messages,
            "continue_final_message": continues,
            "add_generation_prompt": not continues,
            "tools": [translate_tool(tool, "input_schema") for tool in self.tools],
            "tool_choice": CHOICES.get(choice.type, named_choice),
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
            "reasoning_effort": self.output_config.effort,
            "response_format": self.output_config.format,
            "thinking": self.thinking,
        }


def check_final(turn: Turn) -> None:
    """Raise RequestError for an assistant's turn that no answer can continue."""
    blocks = (
        turn.content if isinstance(turn.content, list) else [{"type": "text", "text": turn.content}]
    )
    kinds = [str(block.get("type")) for block in blocks]
    text = str(blocks[-1].get("text")) if blocks else ""
    if "tool_use" in kinds or kinds[-1:] not in ([], ["text"]):
        reason = f"ends in {kinds[-1]!r}; it must end in text, and a tool_use be followed by its tool_result"
    elif text != text.rstrip():
        reason = "cannot end with trailing white space"
    else:
        return
    raise RequestError(
        f"the final assistant message, which the answer continues, {reason}", "messages"
    )


def translate_turn(turn: Turn) -> list[dict[str, Any]]:
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results = []
    texts = []
    calls = []
    thoughts = []
    for block in turn.content:
        match block.get("type"):
            case "tool_result":
                content = read_text(block.get("content"), ["text"], "messages[].content[].content")
                results.append(
                    {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
                )
            case "tool_use":
                calls.append(
                    make_call(
                        block.get("id"), block.get("name"), json.dumps(block.get("input") or {})
                    )
                )
            case "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                continue
            case _:
                texts.append(read_text([block], ["text"], "messages[].content"))
    message: dict[str, Any] = {"role": turn.role, "content": "\n".join(texts)}
    if turn.role == ASSISTANT:
        message |= {"tool_calls": calls} if calls else {}
        message |= {"reasoning_content": "\n".join(thoughts)} if any(thoughts) else {}
    elif calls:
        raise RequestError("tool_use is an assistant's", "messages[].content")
    # Results of tools belong to the previous turn, so they come first, one message each
    return [*results, *([message] if texts or turn.role != USER or not results else [])]


class MessagesAnswer(BlockAnswer):
    def __init__(self, request: MessagesRequest, context: ServingContext):
        super().__init__(request, context)
        self.id = f"msg_{uuid.uuid4().hex}"

    def format_message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        fixed = {"id": self.id, "type": "message", "role": ASSISTANT, "model": self.model}
        return {**fixed, "content": content, **self.format_reason(), "usage": self.format_usage()}

    def format_reason(self) -> dict[str, Any]:
        reason = "stop_sequence" if self.stop is not None else REASONS.get(self.finish_reason or "")
        return {"stop_reason": reason, "stop_sequence": self.stop}

    def format_usage(self) -> dict[str, int]:
        usage = self.choices.count_usage()
        cached = usage.cached or 0
        # Cached tokens are not among Anthropic's input tokens
        return {
            "input_tokens": usage.prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion,
        }

    def format_answer(self) -> dict[str, Any]:
        return self.format_message([format_block(block, block.text) for block in self.blocks])

    def open_stream(self) -> str:
        return write_event("message_start", message=self.format_message([]))

    def open_block(self, block: Block) -> str:
        return write_event(
            "content_block_start", index=block.index, content_block=format_block(block, "")
        )

    def write_text(self, block: Block, text: str) -> str:
        kind, name = DELTAS[block.kind]
        return write_event(
            "content_block_delta", index=block.index, delta={"type": kind, name: text}
        )

    def close_block(self, block: Block) -> str:
        return write_event("content_block_stop", index=block.index)

    def close_stream(self) -> str:
        return write_event(
            "message_delta", delta=self.format_reason(), usage=self.format_usage()
        ) + write_event("message_stop")

    def write_failure(self, error: ClientError) -> str:
        return write_event("error", error=error.format_body("/v1/messages")["error"])


def format_block(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": text, "citations": None}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": parse_arguments(text)}


def count_tokens(request: MessagesRequest, context: ServingContext) -> dict[str, int]:
    _, prompt = prepare_prompt(request.translate(), context)
    return {"input_tokens": len(prompt)}
