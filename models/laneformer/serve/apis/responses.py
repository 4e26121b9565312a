"""/v1/responses: a conversation in items. Nothing is stored: each request brings them all."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Annotated, Any, Literal

from ...chat import ASSISTANT, SYSTEM
from ..bodies import Body, RequestError
from ..context import ServingContext
from ..conversation import Block
from ..parts import Objects, Reasoning, ResponseFormat
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

TEXTS = ["input_text", "output_text", "text", "summary_text", "reasoning_text"]
CALL = "function_call"
NAMES = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}


class TextOptions(Body):
    ignored = {"verbosity": ["medium"]}

    format: ResponseFormat = ResponseFormat()


class NamedFunction(Body):
    type: Literal["function"]
    name: str


class ResponsesRequest(TranslatedRequest):
    aliases = {**TranslatedRequest.aliases, "max_output_tokens": "max_tokens"}
    api_names = {
        r"^messages\S*": "input",
        r"^(tools\S*?|tool_choice)\.function": r"\1",
        r"^response_format": "text.format",
    }

    input: str | Objects
    instructions: str | None = None
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Reasoning()
    text: TextOptions = TextOptions()
    tool_choice: Literal["none", "auto", "required"] | NamedFunction = "auto"
    tools: Annotated[Objects, select_tools("function")] = []

    def translate_fields(self) -> dict[str, Any]:
        choice: Any = self.tool_choice
        if isinstance(choice, NamedFunction):
            choice = {"type": "function", "function": {"name": choice.name}}
        return {
            "messages": self.translate_messages(),
            "tools": [translate_tool(tool, "parameters") for tool in self.tools],
            "tool_choice": choice,
            "response_format": self.text.format,
            "reasoning": self.reasoning,
            "parallel_tool_calls": self.parallel_tool_calls,
        }

    def translate_messages(self) -> list[dict[str, Any]]:
        items = self.input
        rules = self.instructions
        messages = [{"role": SYSTEM, "content": rules}] if rules else []
        for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
            add_item(item, messages)
        return messages


def add_item(item: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    kind = item.get("type", "message")
    role = item.get("role")
    if kind == "message" and role != ASSISTANT:
        messages.append(
            {"role": role, "content": read_text(item.get("content"), TEXTS, "input[].content")}
        )
    elif kind == "function_call_output":
        content = read_text(item.get("output"), TEXTS, "input[].output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind in ("message", "reasoning", CALL):
        # Consecutive items of an assistant form one message, whose calls come last
        last = messages[-1] if messages else {}
        if last.get("role") != ASSISTANT or (kind != CALL and "tool_calls" in last):
            messages.append({"role": ASSISTANT, "content": ""})
        if kind == "message":
            messages[-1]["content"] += read_text(item.get("content"), TEXTS, "input[].content")
        elif kind == "reasoning":
            messages[-1]["reasoning_content"] = read_text(
                item.get("content"), TEXTS, "input[].content"
            )
        else:
            call = make_call(item.get("call_id"), item.get("name"), item.get("arguments") or "")
            messages[-1].setdefault("tool_calls", []).append(call)
    else:
        raise RequestError(
            f"input holds an item of the type {str(kind)[:80]!r}, which is not supported", "input"
        )


class ResponsesAnswer(BlockAnswer):
    def __init__(self, request: ResponsesRequest, context: ServingContext):
        super().__init__(request, context)
        self.request = request
        self.id = f"resp_{uuid.uuid4().hex}"
        self._events = 0

    def format_response(self, status: str, **more: Any) -> dict[str, Any]:
        request = self.request
        options = self.choices.options
        return {
            "id": self.id,
            "object": "response",
            "created_at": int(self.begun_s),
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_tokens,
            "model": self.model,
            "output": [],
            "previous_response_id": None,
            "parallel_tool_calls": request.parallel_tool_calls,
            "store": False,
            "background": False,
            "reasoning": {"effort": request.reasoning.effort, "summary": None},
            "truncation": "disabled",
            **request.model_dump(include={"text", "tool_choice"}, by_alias=True, exclude_none=True),
            "tools": [{"strict": None, "parameters": None, **tool} for tool in request.tools],
            "temperature": options and options.temperature,
            "top_p": options and options.top_p,
            "usage": None,
            "metadata": {},
            **more,
        }

    def format_answer(self) -> dict[str, Any]:
        tokens = self.choices.count_usage()
        usage = {
            "total_tokens": tokens.prompt + tokens.completion,
            "input_tokens": tokens.prompt,
            "output_tokens": tokens.completion,
            "input_tokens_details": {"cached_tokens": tokens.cached or 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": tokens.reasoning},
        }
        output = [format_item(block) for block in self.blocks]
        status = "incomplete" if self.finish_reason == "length" else "completed"
        return self.format_response(status, output=output, usage=usage)

    def open_stream(self) -> str:
        return "".join(
            self.write_event(kind, response=self.format_response("in_progress"))
            for kind in ("created", "in_progress")
        )

    def open_block(self, block: Block) -> str:
        item = format_item(replace(block, text=""), "in_progress")
        events = self.write_event("output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return events
        return events + self.write_block_event(
            block, "content_part.added", part=format_part(block, "")
        )

    def write_text(self, block: Block, text: str) -> str:
        return self.write_block_event(block, f"{NAMES[block.kind]}.delta", delta=text, logprobs=[])

    def close_block(self, block: Block) -> str:
        kind = f"{NAMES[block.kind]}.done"
        item = format_item(block)
        if block.kind == "call":
            # Clients run the call at this event, so an incomplete call must not send it
            events = ""
            if not block.is_cut:
                events = self.write_block_event(block, kind, name=block.name, arguments=block.text)
        else:
            events = self.write_block_event(block, kind, text=block.text, logprobs=[])
            events += self.write_block_event(
                block, "content_part.done", part=format_part(block, block.text)
            )
        return events + self.write_event("output_item.done", output_index=block.index, item=item)

    def close_stream(self) -> str:
        response = self.format_answer()
        return self.write_event(response["status"], response=response)

    def write_failure(self, error: ClientError) -> str:
        failure = {"code": error.code or error.type, "message": error.message}
        return self.write_event("failed", response=self.format_response("failed", error=failure))

    def write_block_event(self, block: Block, kind: str, **fields: Any) -> str:
        place = {"item_id": make_item_id(block), "output_index": block.index, "content_index": 0}
        return self.write_event(kind, **place, **fields)

    def write_event(self, kind: str, **fields: Any) -> str:
        self._events += 1
        return write_event(f"response.{kind}", sequence_number=self._events - 1, **fields)


def format_part(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def make_item_id(block: Block) -> str:
    prefix = {"reasoning": "rs", "text": "msg", "call": "fc"}[block.kind]
    return f"{prefix}_{block.id}"


def format_item(block: Block, status: str = "") -> dict[str, Any]:
    """Return a block as an item of the output, with the status that it ended with by default."""
    item = {
        "id": make_item_id(block),
        "status": status or ("incomplete" if block.is_cut else "completed"),
    }
    if block.kind == "call":
        return {
            **item,
            "type": CALL,
            "call_id": block.id,
            "name": block.name,
            "arguments": block.text,
        }
    content = [] if status else [format_part(block, block.text)]
    if block.kind == "reasoning":
        return {**item, "type": "reasoning", "summary": [], "content": content}
    return {**item, "type": "message", "role": ASSISTANT, "content": content}
