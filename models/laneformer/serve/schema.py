"""The fields of OpenAI's two endpoints: each is used, without effect, or refused by name.

Fields beyond OpenAI's have the names that other servers gave them.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from ..chat import ASSISTANT, SYSTEM
from ..engine import GenerationOptions
from ..engine.options import BIAS_RANGE, MAX_DRAFT_TOKENS, MAX_LOGPROBS, RANGES
from .bodies import HALF_PAIR, STRICTLY, Body, RequestError, refuse

DEFAULT_TOKENS = 16  # of a completion: OpenAI's
MAX_CHOICES = 128  # of one request, all its prompts together
MAX_PARTS = 2**12  # of a content, and tools: the longer a list, the longer its check holds up other threads
MAX_MESSAGES = 2**16
MAX_TOOLS = 128
NAME = r"^[a-zA-Z0-9_-]{1,64}$"  # of schemas and functions, as OpenAI allows them
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
EFFORTS = "low", "medium", "high"  # of reasoning
MAX_STOPS = 16  # OpenAI has 4; evaluations send more
MIN_TOP_P = 1e-12  # for 0, which OpenAI allows: the likeliest token alone

Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[int], Field(fail_fast=True)]
Count = Annotated[int, Field(ge=0)]
UNTIL_THE_END = -1  # of the context: what null and -1 as a limit of new tokens mean
Limit = Annotated[
    Annotated[int, Field(ge=1)] | None,
    BeforeValidator(lambda value: None if type(value) is int and value == UNTIL_THE_END else value, int),
]
Likeliest = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Biases = dict[
    Annotated[str, Field(pattern=r"^[0-9]+$")], Annotated[float, Field(ge=BIAS_RANGE[0], le=BIAS_RANGE[1])]
]
Objects = Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS, fail_fast=True)]


def as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def as_prompts(value: Any) -> list[str | Ids]:
    """Checked here and not by pydantic, which would hold up all other threads."""
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        value = [value]
    if not isinstance(value, list) or len({type(prompt) for prompt in value[:MAX_CHOICES]}) > 1:
        raise ValueError("no prompts")
    for prompt in value[:MAX_CHOICES]:
        if not isinstance(prompt, str) and not (
            isinstance(prompt, list) and all(type(token) is int for token in prompt)
        ):
            raise ValueError("no prompts")
    return value


class StreamOptions(Body):
    place = "stream_options."
    unused = {"include_obfuscation": [False]}

    include_usage: bool = False
    continuous_usage_stats: bool = False  # usage so far in every chunk


class Sampled(Body):
    """What both endpoints know."""

    unused = {"user": None}
    neutral = {
        "typical_p": [1], "tfs_z": [1], "top_a": [0], "mirostat": [0], "xtc_probability": [0],
        "dry_multiplier": [0], "dynatemp_range": [0],
    }  # fmt: skip
    renamed = {"repeat_penalty": "repetition_penalty"}

    model: str | None = None
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: Annotated[Biases, Field(max_length=MAX_PARTS)] = {}
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[list[Text], Field(max_length=MAX_STOPS), BeforeValidator(as_list, str | list[str])] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    # beyond OpenAI's
    top_k: Annotated[int, Field(ge=-1, le=RANGES["top_k"][2])] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    ignore_eos: bool = False
    min_tokens: Count = 0
    stop_token_ids: Ids = []
    speculate: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)] | None = None
    return_token_ids: bool = False

    @model_validator(mode="after")
    def _check_stream_options(self, info: ValidationInfo) -> Self:
        if "stream_options" in self.model_fields_set and not self.stream:
            reading = info.context or STRICTLY
            if reading.strict:
                refuse("stream_options", "stream_options needs stream = true")
            reading.unused["stream_options"] = None
        return self

    def options(
        self, defaults: Mapping[str, Any], max_new_tokens: int, logprobs: int | None
    ) -> GenerationOptions:
        """For the engine; defaults: for what the request leaves open."""
        chosen = dict(defaults)
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "speculate"):
            if getattr(self, name) is not None:
                chosen[name] = getattr(self, name)
        chosen["top_k"] = max(0, chosen.get("top_k", 0))
        chosen["top_p"] = max(MIN_TOP_P, chosen.get("top_p", 1.0))
        try:
            return GenerationOptions(
                **chosen,
                frequency_penalty=self.frequency_penalty,
                presence_penalty=self.presence_penalty,
                ignore_eos=self.ignore_eos,
                seed=secrets.randbits(64) if self.seed is None else self.seed % 2**64,
                max_new_tokens=max_new_tokens,
                min_new_tokens=self.min_tokens,
                logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
                stop_ids=self.stop_token_ids,
                logprobs=logprobs,
            )
        except ValueError as error:
            raise RequestError(str(error)) from None


class CompletionRequest(Sampled):
    """/v1/completions."""

    refused = {"suffix": "the model continues text and fills no gaps; send a prompt alone"}

    prompt: Annotated[list[Any], BeforeValidator(as_prompts, str | list[str] | Ids | list[Ids])]
    best_of: int | None = None
    echo: bool = False
    logprobs: Likeliest | None = None
    max_tokens: Annotated[int, Field(ge=UNTIL_THE_END)] = DEFAULT_TOKENS

    @model_validator(mode="before")
    @classmethod
    def _to_the_end(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("max_tokens", 0) is None:
            return {**data, "max_tokens": UNTIL_THE_END}
        return data

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.best_of not in (None, self.n):
            refuse(
                "best_of",
                f"best_of = {self.best_of} must equal n = {self.n}: every choice that is drawn is sent",
            )
        if self.max_tokens == 0 and not self.echo:
            refuse("max_tokens", "max_tokens = 0 needs echo = true; without, it must be at least 1")
        if not 1 <= (count := len(self.prompt) * self.n) <= MAX_CHOICES:
            refuse(
                "prompt", f"{len(self.prompt)} prompts, n = {self.n}: {count} choices; 1 to {MAX_CHOICES} fit"
            )
        return self


class Called(Body):
    place = "messages[].tool_calls[].function."
    unused = {"parsed_arguments": None}  # of the openai client's own, sent back

    name: str
    arguments: str


class ToolCall(Body):
    place = "messages[].tool_calls[]."
    unused = {"index": None}  # left in by programs that put deltas together

    id: str | None = None
    type: Literal["function"] = "function"
    function: Called


class Function(Body):
    place, closed = "tools[].function.", True

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
    place = "tools[]."

    type: Literal["function"]
    function: Function


class ResponseFormat(Body):
    place, closed = "response_format.", True

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: dict[str, Any] = {}

    @model_validator(mode="after")
    def _has_a_name(self) -> Self:
        name = self.json_schema.get("name")
        if self.type == "json_schema" and not (isinstance(name, str) and re.fullmatch(NAME, name)):
            refuse("json_schema.name", f"json_schema.name = {name!r:.80} must match {NAME}")
        return self

    def schema_and_place(self) -> tuple[Any, str]:
        """The JSON schema of the answer, and how errors call it."""
        if self.type == "json_object":
            return {"type": "object"}, "response_format"
        return self.json_schema.get("schema"), "response_format.json_schema.schema"


class FunctionName(Body):
    place = "tool_choice.function."

    name: str


class ToolChoice(Body):
    """The one tool that is to be called."""

    place = "tool_choice."

    type: Literal["function"]
    function: FunctionName


class TextPart(Body):
    place = "messages[].content[]."
    unused = {"cache_control": None}

    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None


def texts_of(content: Content) -> list[str]:
    return [part.text for part in content] if isinstance(content, list) else [content or ""]


class Prediction(Body):
    """What most of the answer is expected to be: drafts are taken from it, the answer stays the same."""

    type: Literal["content"] = "content"
    content: Content


class Message(Body):
    refused = {
        "audio": "the model reads text only",
        "refusal": "send what the assistant wrote as content",
        "function_call": "use tool_calls",
    }
    place = "messages[]."
    renamed = {"reasoning": "reasoning_content"}
    unused = {"annotations": [[]], "parsed": None}  # of our own answers and the openai client's, sent back

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and not self.tool_calls and self.role != ASSISTANT:
            refuse("content", f"content is missing in a message of the role {self.role!r}; send text")
        if self.tool_calls and self.role != ASSISTANT:
            refuse("tool_calls", f"tool_calls are an assistant's, not of the role {self.role!r}")
        return self

    def plain(self) -> dict[str, Any]:
        """For a template: content as one text, a developer as the system, arguments as values."""
        without = None if self.tool_calls else {"tool_calls"}
        message = self.model_dump(exclude_none=True, exclude=without)
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


class ConversationRequest(Sampled):
    """/v1/chat/completions."""

    refused = {
        "audio": "the model writes text only",
        "functions": "use tools",
        "function_call": "use tool_choice",
        "moderation": "answers are not moderated",
        "web_search_options": "the model cannot search",
    }
    neutral = {**Sampled.neutral, "modalities": [["text"]]}
    renamed = {
        **Sampled.renamed,
        "thinking_token_budget": "reasoning_budget",
        "thinking_budget": "reasoning_budget",
    }
    unused = {
        **Sampled.unused, "metadata": None, "prompt_cache_key": None, "prompt_cache_options": None,
        "prompt_cache_retention": ["in_memory"], "reasoning_effort": ["none", *EFFORTS],
        "safety_identifier": None, "service_tier": ["auto", "default"], "store": [False], "verbosity": ["medium"],
    }  # fmt: skip

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    logprobs: bool = False
    top_logprobs: Likeliest | None = None
    max_tokens: Limit = None
    max_completion_tokens: Limit = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = []
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    # beyond OpenAI's
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_budget: Annotated[int, Field(ge=-1)] | None = None  # most tokens of reasoning; -1: any number

    @model_validator(mode="before")
    @classmethod
    def _effort(cls, data: Any) -> Any:
        """As variables of templates, which know them or not."""
        effort = data.get("reasoning_effort") if isinstance(data, dict) else None
        if effort == "none":
            return {"chat_template_kwargs": {"enable_thinking": False}, **data}
        return {"chat_template_kwargs": {"reasoning_effort": effort}, **data} if effort in EFFORTS else data

    @model_validator(mode="after")
    def _possible(self) -> Self:
        most, old = self.max_completion_tokens, self.max_tokens
        if None not in (most, old) and most != old:
            refuse(
                "max_tokens",
                f"max_tokens = {old} contradicts max_completion_tokens = {most}; send one of them",
            )
        self._check_tools()
        if self.top_logprobs is not None and not self.logprobs:
            refuse("top_logprobs", "top_logprobs needs logprobs = true")
        if self.continue_final_message:
            self._check_continued()
        own = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
        for name in own & self.chat_template_kwargs.keys():
            refuse(
                "chat_template_kwargs",
                f"chat_template_kwargs has {name!r}, which is a field of the request itself",
            )
        return self

    def _check_continued(self) -> None:
        last, reason = self.messages[-1], ""
        if self.add_generation_prompt:
            reason = "excludes add_generation_prompt, which is true by default; send it as false"
        elif last.role != ASSISTANT or last.tool_calls or not any(texts_of(last.content)):
            reason = "needs an assistant's text, without tool_calls, as the last message"
        elif self.response_format is not None and self.response_format.type != "text":
            reason = "cannot be combined with response_format, which is the form of a whole answer"
        if reason:
            refuse("continue_final_message", f"continue_final_message {reason}")

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            refuse("tools", f"tools has two functions of one name: {sorted(names)}; give each its own")
        choice = self.tool_choice
        if isinstance(choice, ToolChoice) and choice.function.name not in names:
            refuse("tool_choice", f"tool_choice names {choice.function.name!r}, but the tools are {names}")
        if choice == "required" and not names:
            refuse("tool_choice", "tool_choice = 'required' needs tools")
