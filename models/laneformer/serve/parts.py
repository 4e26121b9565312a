"""Parts of a conversation's request: messages, tools, formats of the answer, and how it reasons."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from ..chat import ASSISTANT, SYSTEM
from .bodies import HALF_PAIR, STRICTLY, Body, refuse

# of a content, and tools: the longer a list, the longer its check holds up other threads
MAX_PARTS = 2**12
NAME = r"^[a-zA-Z0-9_-]{1,64}$"  # of schemas and functions, as OpenAI allows them
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
EFFORTS = "none", "low", "medium", "high"  # of reasoning

Objects = Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS, fail_fast=True)]


def check_effort(effort: str, info: ValidationInfo) -> str | None:
    """One that templates know."""
    if effort in EFFORTS:
        return effort
    name = str(info.field_name)
    (info.context or STRICTLY).pass_over(name, f"{name} = {effort!r:.80} must be one of {EFFORTS}")
    return None


Effort = Annotated[str, AfterValidator(check_effort)]


class Called(Body):
    place, is_open = "messages[].tool_calls[].function.", True
    harmless = {"parsed_arguments": None}  # of the openai client's own, sent back

    name: str
    arguments: str


class ToolCall(Body):
    place, is_open = "messages[].tool_calls[].", True
    harmless = {"index": None}  # left in by programs that put deltas together

    id: str | None = None
    type: Literal["function"] = "function"
    function: Called


class Function(Body):
    name: Annotated[str, Field(pattern=NAME)]
    description: str = ""
    parameters: dict[str, Any] = NO_PARAMETERS
    strict: bool = False  # arguments follow the schema anyway

    @model_validator(mode="after")
    def _takes_an_object(self) -> Self:
        if self.parameters.get("type") != "object":
            refuse("parameters", "parameters must be a JSON schema of type 'object'")
        return self

    def plain(self) -> dict[str, Any]:
        """For a template."""
        return self.model_dump(exclude={"strict"})


class Tool(Body):
    place, is_open = "tools[].", True

    type: Literal["function"]
    function: Function


class JsonSchema(Body):
    harmless = {"description": None, "strict": None}

    name: Annotated[str, Field(pattern=NAME)]
    value: Any = Field(default=None, alias="schema")


class ResponseFormat(Body):
    """In each API's form: with json_schema (chat completions), or with the schema itself."""

    harmless = {"description": None, "strict": None}

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    json_schema: JsonSchema | None = None
    value: Any = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _demands_json(self) -> Self:
        if self.type == "text" and (self.json_schema or self.value):
            refuse("type", "type = 'text' takes no schema; use 'json_schema'")
        return self

    def schema_and_place(self) -> tuple[Any, str]:
        """The JSON schema of the answer, and how errors call it."""
        if self.json_schema:
            return self.json_schema.value, "response_format.json_schema.schema"
        any_object = {"type": "object"} if self.type == "json_object" else None
        return self.value or any_object, "response_format.schema"


class FunctionName(Body):
    name: str


class ToolChoice(Body):
    """The one tool that is to be called."""

    type: Literal["function"]
    function: FunctionName


class TextPart(Body):
    place, is_open = "messages[].content[].", True
    harmless = {"cache_control": None}

    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None


def texts_of(content: Content) -> list[str]:
    return [part.text for part in content] if isinstance(content, list) else [content or ""]


class Prediction(Body):
    """What most of the answer is expected to be: drafts are taken from it, the answer stays the same."""

    type: Literal["content"] = "content"
    content: Content


class Thinking(Body):
    """Anthropic's."""

    harmless = {"display": None}

    type: Literal["enabled", "disabled", "adaptive", "between_tools"] = "enabled"
    budget_tokens: Annotated[int, Field(ge=-1)] | None = None


class Reasoning(Body):
    """OpenAI's."""

    harmless = {"context": (), "generate_summary": None, "mode": (), "summary": None}
    neutral = {"enabled": [True], "exclude": [False]}

    effort: Effort | None = None


class Message(Body):
    place, is_open = "messages[].", True
    refused = {
        "audio": "the model reads text only",
        "refusal": "send what the assistant wrote as content",
        "function_call": "use tool_calls",
    }
    renamed = {"reasoning": "reasoning_content"}
    harmless = {"parsed": None}  # of the openai client's, sent back

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and not self.tool_calls and self.role != ASSISTANT:
            refuse(
                "content", f"content is missing in a message of the role {self.role!r}; send text"
            )
        if self.tool_calls and self.role != ASSISTANT:
            refuse("tool_calls", f"tool_calls are an assistant's, not of the role {self.role!r}")
        return self

    def plain(self) -> dict[str, Any]:
        """For a template: content as one text, a developer as the system, arguments as values."""
        message = self.model_dump(
            exclude_none=True, exclude=None if self.tool_calls else {"tool_calls"}
        )
        message["role"] = SYSTEM if self.role == "developer" else self.role
        message["content"] = "\n".join(texts_of(self.content))
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = arguments_of(call["function"]["arguments"])
        return message


def arguments_of(text: str) -> Any:
    """Of a call, as a value; {"cut": text} where an answer has ended within them."""
    try:
        value = json.dumps(json.loads(text or "{}"), ensure_ascii=False)
    except (ValueError, RecursionError):
        return {"cut": text}
    return json.loads(HALF_PAIR.sub("\ufffd", value))


def is_cut(arguments: str) -> bool:
    return not arguments or arguments_of(arguments) == {"cut": arguments}
