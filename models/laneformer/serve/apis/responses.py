"""/v1/responses: OpenAI's newer form of a conversation, in items. Nothing is stored: each request brings them all."""

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
    event,
    function_call,
    function_tool,
    own_tools,
    text_of,
)

TEXTS = ["input_text", "output_text", "text", "summary_text", "reasoning_text"]
CALL = "function_call"
NAMES = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}


class TextOptions(Body):
    harmless = {"verbosity": ["medium"]}

    format: ResponseFormat = ResponseFormat()


class NamedFunction(Body):
    type: Literal["function"]
    name: str


class ResponsesRequest(TranslatedRequest):
    renamed = {**TranslatedRequest.renamed, "max_output_tokens": "max_tokens"}
    own_names = {
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
    tools: Annotated[Objects, own_tools("function")] = []

    def fields(self) -> dict[str, Any]:
        choice: Any = self.tool_choice
        if isinstance(choice, NamedFunction):
            choice = {"type": "function", "function": {"name": choice.name}}
        return {
            "messages": self.messages(),
            "tools": [function_tool(tool, "parameters") for tool in self.tools],
            "tool_choice": choice,
            "response_format": self.text.format,
            "reasoning": self.reasoning,
            "parallel_tool_calls": self.parallel_tool_calls,
        }

    def messages(self) -> list[dict[str, Any]]:
        """An assistant's items in a row are one message."""
        items, rules = self.input, self.instructions
        messages = [{"role": SYSTEM, "content": rules}] if rules else []
        for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
            add_item(item, messages)
        return messages


def add_item(item: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """Append an item of the input to messages of a chat completion."""
    kind, role = item.get("type", "message"), item.get("role")
    if kind == "message" and role != ASSISTANT:
        messages.append(
            {"role": role, "content": text_of(item.get("content"), TEXTS, "input[].content")}
        )
    elif kind == "function_call_output":
        content = text_of(item.get("output"), TEXTS, "input[].output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind in ("message", "reasoning", CALL):
        if (
            not messages
            or messages[-1]["role"] != ASSISTANT
            or (kind != CALL and "tool_calls" in messages[-1])
        ):
            messages.append({"role": ASSISTANT, "content": ""})
        if kind == "message":
            messages[-1]["content"] += text_of(item.get("content"), TEXTS, "input[].content")
        elif kind == "reasoning":
            messages[-1]["reasoning_content"] = text_of(
                item.get("content"), TEXTS, "input[].content"
            )
        else:
            call = function_call(item.get("call_id"), item.get("name"), item.get("arguments") or "")
            messages[-1].setdefault("tool_calls", []).append(call)
    else:
        raise RequestError(
            f"input holds an item of the type {str(kind)[:80]!r}, which none reads", "input"
        )


class ResponsesAnswer(BlockAnswer):
    def __init__(self, request: ResponsesRequest, context: ServingContext):
        super().__init__(request, context)
        self.request, self.id, self._events = request, f"resp_{uuid.uuid4().hex}", 0

    def response(self, status: str, **more: Any) -> dict[str, Any]:
        request, options = self.request, self.choices.options
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

    def whole_answer(self) -> dict[str, Any]:
        used = self.used
        usage = {
            "total_tokens": used["total_tokens"],
            "input_tokens": used["prompt_tokens"],
            "output_tokens": used["completion_tokens"],
            "input_tokens_details": {
                "cached_tokens": used["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens_details": {"reasoning_tokens": used["reasoning_tokens"]},
        }
        output = [item_of(block) for block in self.blocks]
        status = "incomplete" if self.finish_reason == "length" else "completed"
        return self.response(status, output=output, usage=usage)

    def opening(self) -> str:
        return "".join(
            self.event(kind, response=self.response("in_progress"))
            for kind in ("created", "in_progress")
        )

    def begin_of(self, block: Block) -> str:
        item = item_of(replace(block, text=""), "in_progress")
        begun = self.event("output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return begun
        return begun + self.block_event(block, "content_part.added", part=part_of(block, ""))

    def more(self, block: Block, text: str) -> str:
        return self.block_event(block, f"{NAMES[block.kind]}.delta", delta=text, logprobs=[])

    def end_of(self, block: Block) -> str:
        kind, item = f"{NAMES[block.kind]}.done", item_of(block)
        if block.kind == "call":  # clients make the call when its arguments are done
            done = self.block_event(block, kind, name=block.name, arguments=block.text)
            ended = "" if block.is_cut else done
        else:
            ended = self.block_event(block, kind, text=block.text, logprobs=[])
            ended += self.block_event(block, "content_part.done", part=part_of(block, block.text))
        return ended + self.event("output_item.done", output_index=block.index, item=item)

    def closing(self) -> str:
        done = self.whole_answer()
        return self.event(done["status"], response=done)

    def failure_events(self, error: ClientError) -> str:
        failure = {"code": error.code or error.type, "message": error.message}
        return self.event("failed", response=self.response("failed", error=failure))

    def block_event(self, block: Block, kind: str, **fields: Any) -> str:
        place = {"item_id": item_id(block), "output_index": block.index, "content_index": 0}
        return self.event(kind, **place, **fields)

    def event(self, kind: str, **fields: Any) -> str:
        self._events += 1
        return event(f"response.{kind}", sequence_number=self._events - 1, **fields)


def part_of(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def item_id(block: Block) -> str:
    prefix = {"reasoning": "rs", "text": "msg", "call": "fc"}[block.kind]
    return f"{prefix}_{block.id}"


def item_of(block: Block, status: str = "") -> dict[str, Any]:
    """status: by default as it has ended."""
    item = {
        "id": item_id(block),
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
    content = [] if status else [part_of(block, block.text)]
    if block.kind == "reasoning":
        return {**item, "type": "reasoning", "summary": [], "content": content}
    return {**item, "type": "message", "role": ASSISTANT, "content": content}
