"""Parts of a conversation's request: messages, tools, formats of the answer, reasoning."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from ..chat import ASSISTANT, SYSTEM
from .bodies import HALF_PAIR, STRICTLY, Body, refuse
from .fields import SILENT, WARNED

# Of a content, and of tools: the check of a list holds up other threads
MAX_PARTS = 2**12
NAME = r"^[a-zA-Z0-9_-]{1,64}$"  # of schemas and functions, as OpenAI allows them
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
EFFORTS = "none", "low", "medium", "high"

Objects = Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS, fail_fast=True)]


def check_effort(effort: str, info: ValidationInfo) -> str | None:
    """Return an effort of reasoning that templates know, or None with a warning."""
    if effort in EFFORTS:
        return effort
    name = str(info.field_name)
    (info.context or STRICTLY).pass_over(name, f"{name} = {effort!r:.80} must be one of {EFFORTS}")
    return None


Effort = Annotated[str, AfterValidator(check_effort)]


class Called(Body):
    place = "messages[].tool_calls[].function."
    is_open = True
    ignored = {"parsed_arguments": SILENT}  # the openai client adds it, and sends it back

    name: str
    arguments: str


class ToolCall(Body):
    place = "messages[].tool_calls[]."
    is_open = True
    ignored = {"index": SILENT}  # programs that join deltas leave it in

    id: str | None = None
    type: Literal["function"] = "function"
    function: Called


class Function(Body):
    name: Annotated[str, Field(pattern=NAME)]
    description: str = ""
    parameters: dict[str, Any] = NO_PARAMETERS
    strict: bool = False  # without effect: arguments follow the schema anyway

    @model_validator(mode="after")
    def _check_parameters(self) -> Self:
        if self.parameters.get("type") != "object":
            refuse("parameters", "parameters must be a JSON schema of type 'object'")
        return self

    def to_template(self) -> dict[str, Any]:
        return self.model_dump(exclude={"strict"})


class Tool(Body):
    place = "tools[]."
    is_open = True

    type: Literal["function"]
    function: Function


class JsonSchema(Body):
    ignored = {"description": SILENT, "strict": SILENT}

    name: Annotated[str, Field(pattern=NAME)]
    value: Any = Field(default=None, alias="schema")


class ResponseFormat(Body):
    """The form of an answer: `json_schema` in chat completions, the schema itself in other APIs."""

    ignored = {"description": SILENT, "strict": SILENT}

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    json_schema: JsonSchema | None = None
    value: Any = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        if self.type == "text" and (self.json_schema or self.value):
            refuse("type", "type = 'text' takes no schema; use 'json_schema'")
        return self

    def find_schema(self) -> tuple[Any, str]:
        """Return the JSON schema of the answer, and its name in errors."""
        if self.json_schema:
            return self.json_schema.value, "response_format.json_schema.schema"
        any_object = {"type": "object"} if self.type == "json_object" else None
        return self.value or any_object, "response_format.schema"


class FunctionName(Body):
    name: str


class ToolChoice(Body):
    """The one tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class TextPart(Body):
    place = "messages[].content[]."
    is_open = True
    ignored = {"cache_control": SILENT}

    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None


def list_texts(content: Content) -> list[str]:
    return [part.text for part in content] if isinstance(content, list) else [content or ""]


class Prediction(Body):
    """The expected answer, from which drafts are taken; it changes no token."""

    type: Literal["content"] = "content"
    content: Content


class Thinking(Body):
    """Anthropic's field."""

    ignored = {"display": SILENT}

    type: Literal["enabled", "disabled", "adaptive", "between_tools"] = "enabled"
    budget_tokens: Annotated[int, Field(ge=-1)] | None = None


class Reasoning(Body):
    """OpenAI's field."""

    ignored = {"context": WARNED, "generate_summary": SILENT, "mode": WARNED, "summary": SILENT}
    neutral = {"enabled": [True], "exclude": [False]}

    effort: Effort | None = None


class Message(Body):
    place = "messages[]."
    is_open = True
    refused = {
        "audio": "the model reads text only",
        "refusal": "send what the assistant wrote as content",
        "function_call": "use tool_calls",
    }
    aliases = {"reasoning": "reasoning_content"}
    ignored = {"parsed": SILENT}  # the openai client adds it, and sends it back

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and not self.tool_calls and self.role != ASSISTANT:
            refuse(
                "content", f"content is missing in a message of the role {self.role!r}; send text"
            )
        if self.tool_calls and self.role != ASSISTANT:
            refuse("tool_calls", f"tool_calls are an assistant's, not of the role {self.role!r}")
        return self

    def to_template(self) -> dict[str, Any]:
        """Return the message as templates take it: one text as content, arguments as values."""
        message = self.model_dump(
            exclude_none=True, exclude=None if self.tool_calls else {"tool_calls"}
        )
        message["role"] = SYSTEM if self.role == "developer" else self.role
        message["content"] = "\n".join(list_texts(self.content))
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = parse_arguments(call["function"]["arguments"])
        return message


def parse_arguments(text: str) -> Any:
    """Return the arguments of a call as a value; {"cut": text} where they are incomplete."""
    try:
        value = json.dumps(json.loads(text or "{}"), ensure_ascii=False)
    except (ValueError, RecursionError):
        return {"cut": text}
    return json.loads(HALF_PAIR.sub("\ufffd", value))


def is_cut(arguments: str) -> bool:
    return not arguments or parse_arguments(arguments) == {"cut": arguments}
