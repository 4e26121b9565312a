"""The bodies of requests: every field of OpenAI's is known, used or refused by name.

null stands for an absent field. What has no effect here is accepted with a harmless value alone. Fields
beyond OpenAI's have the names that other servers gave them.
"""

from __future__ import annotations

import difflib
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from ..chat import ASSISTANT, SYSTEM
from ..engine import GenerationOptions
from ..engine.options import BIAS_RANGE, MAX_DRAFT_TOKENS, MAX_LOGPROBS, RANGES

MAX_CHOICES = 128  # of one request, all its prompts together
MAX_STOPS = 16  # OpenAI has 4; evaluations send more
MIN_TOP_P = 1e-12  # for 0, which OpenAI allows: the likeliest token alone

Text = Annotated[str, Field(min_length=1)]
Ids = list[int]
Count = Annotated[int, Field(ge=0)]
Limit = Annotated[int, Field(ge=1)]
Likeliest = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Biases = dict[
    Annotated[str, Field(pattern=r"^[0-9]+$")], Annotated[float, Field(ge=BIAS_RANGE[0], le=BIAS_RANGE[1])]
]


class RequestError(ValueError):
    """A request that cannot be answered: the client's fault. status: of HTTP; the others are OpenAI's fields."""

    def __init__(
        self, message: str, param: str | None = None, code: str | None = "invalid_value", status: int = 400
    ):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


class Body(BaseModel):
    """A JSON object with known fields of exact types; `refused`: further known ones, and what to do instead."""

    model_config = ConfigDict(strict=True)
    refused: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        for name in given:
            if name in cls.refused:
                refuse(name, f"{name} is not supported: {cls.refused[name]}", "unsupported_parameter")
            if name not in cls.model_fields:
                near = difflib.get_close_matches(name, [*cls.model_fields, *cls.refused], n=1)
                hint = (
                    f"did you mean {near[0]!r}?"
                    if near
                    else f"known are {', '.join(sorted(cls.model_fields))}"
                )
                refuse(name, f"{name} is unknown; {hint}", "unknown_parameter")
        return given


def refuse(field: str, message: str, code: str = "invalid_value") -> None:
    raise PydanticCustomError("refused", "{message}", {"field": field, "message": message, "code": code})


def as_list(given: Any) -> Any:
    """One text, or the ids of one, as a list of such."""
    return (
        [given]
        if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int)
        else given
    )


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    continuous_usage_stats: bool = False  # usage so far in every chunk


class Sampled(Body):
    """What both endpoints know."""

    model: str | None = None
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: Biases = {}
    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[list[Text], Field(max_length=MAX_STOPS), BeforeValidator(as_list, str | list[str])] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    user: str | None = None
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
    def _streamed(self) -> Self:
        if "stream_options" in self.model_fields_set and not self.stream:
            refuse("stream_options", "stream_options needs stream = true")
        return self

    def options(
        self, defaults: Mapping[str, Any], max_new_tokens: int, logprobs: int | None
    ) -> GenerationOptions:
        """For the engine; defaults: for what the request leaves open."""
        said = {
            name: getattr(self, name)
            for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "speculate")
        }
        chosen = {**defaults, **{name: value for name, value in said.items() if value is not None}}
        chosen["top_k"] = max(0, chosen.get("top_k", 0))
        chosen["top_p"] = max(MIN_TOP_P, chosen.get("top_p", 1.0))
        same = ("frequency_penalty", "presence_penalty", "ignore_eos")
        try:
            return GenerationOptions(
                **chosen,
                **{name: getattr(self, name) for name in same},
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

    prompt: Annotated[list[str] | list[Ids], BeforeValidator(as_list, str | list[str] | Ids | list[Ids])]
    best_of: int | None = None
    echo: bool = False
    logprobs: Likeliest | None = None

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
    name: str
    arguments: str
    parsed_arguments: Annotated[Any, Field(exclude=True)] = None  # of the openai client's own, sent back


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: Called
    index: int | None = None  # left in by programs that put deltas together


Content = str | list[dict[str, Any]] | None


def expect_text(content: Content) -> None:
    for part in content if isinstance(content, list) else ():
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            refuse(
                "content",
                f"content holds {str(part)[:80]}; the model reads {{'type': 'text', 'text': ...}}",
            )


def texts_of(content: Content) -> list[str]:
    return [part["text"] for part in content] if isinstance(content, list) else [content or ""]


class Prediction(Body):
    """What most of the answer is expected to be: drafts are taken from it, the answer stays the same."""

    type: Literal["content"] = "content"
    content: Content

    @model_validator(mode="after")
    def _has_text(self) -> Self:
        expect_text(self.content)
        return self


class Message(Body):
    refused = {
        "audio": "the model reads text only",
        "refusal": "send what the assistant wrote as content",
        "function_call": "use tool_calls",
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] = []  # of our own answers, sent back
    parsed: Annotated[Any, Field(exclude=True)] = None  # of the openai client's own

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and not self.tool_calls:
            refuse("content", f"content is missing in a message of the role {self.role!r}; send text")
        if self.tool_calls and self.role != ASSISTANT:
            refuse("tool_calls", f"tool_calls are an assistant's, not of the role {self.role!r}")
        expect_text(self.content)
        return self

    def plain(self) -> dict[str, Any]:
        """For a template: content as one text, a developer as the system, arguments as values."""
        without = {"annotations"} if self.tool_calls else {"annotations", "tool_calls"}
        found = self.model_dump(exclude_none=True, exclude=without)
        found["role"] = SYSTEM if self.role == "developer" else self.role
        found["content"] = "\n".join(texts_of(self.content))
        for call in found.get("tool_calls", []):
            function = call["function"]
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError):
                message = (
                    f"arguments of a call of {function['name']!r} are no JSON: {function['arguments'][:80]!r}"
                )
                raise RequestError(message, "messages") from None
        return found


class ConversationRequest(Sampled):
    """/v1/chat/completions."""

    refused = {
        "audio": "the model writes text only",
        "functions": "use tools",
        "function_call": "use tool_choice",
        "moderation": "answers are not moderated",
        "web_search_options": "the model cannot search",
    }

    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool = False
    top_logprobs: Likeliest | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] | None = None
    prediction: Prediction | None = None
    # without effect
    metadata: dict[str, str] | None = None
    modalities: list[Literal["text"]] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    reasoning_effort: Literal["none"] | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] = False
    verbosity: Literal["medium"] | None = None
    # beyond OpenAI's
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _possible(self) -> Self:
        most, old = self.max_completion_tokens, self.max_tokens
        if None not in (most, old) and most != old:
            refuse(
                "max_tokens",
                f"max_tokens = {old} contradicts max_completion_tokens = {most}; send one of them",
            )
        if self.top_logprobs is not None and not self.logprobs:
            refuse("top_logprobs", "top_logprobs needs logprobs = true")
        for name in {"messages", "tools", "add_generation_prompt"} & self.chat_template_kwargs.keys():
            refuse(
                "chat_template_kwargs",
                f"chat_template_kwargs has {name!r}, which is a field of the request itself",
            )
        return self


EXPECTED = {  # of fields with several types
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": f"a text, or a list of at most {MAX_STOPS} texts, none of them empty",
    "content": "a text, or a list of parts {'type': 'text', 'text': ...}",
    "tool_choice": "'none', 'auto', 'required', or an object that names a tool",
}


def refusal(errors: Sequence[Any]) -> RequestError:
    """What a client is told about a bad body; `errors` as of pydantic's or FastAPI's validation error."""
    error = next(
        (e for e in errors if e["type"] == "refused"), errors[0]
    )  # a better reason than a type of several
    path = [part for part in error["loc"] if part != "body"]
    field = next((name for name in path if name in EXPECTED), None)
    if field is not None:
        path = path[: path.index(field) + 1]  # pydantic goes on with the type that it tried
    if error["type"] == "refused":
        return RequestError(
            error["ctx"]["message"], spelled([*path, error["ctx"]["field"]]), error["ctx"]["code"]
        )
    if error["type"] == "json_invalid" or not path:
        return RequestError(f"the body is not a JSON object: {error['msg']}", None, "invalid_json")
    if error["type"] == "missing":
        return RequestError(f"{spelled(path)} is missing", spelled(path), "missing_required_parameter")
    wanted = f"it must be {EXPECTED[field]}" if field else error["msg"][:1].lower() + error["msg"][1:]
    return RequestError(
        f"{spelled(path)} = {json.dumps(error['input'], default=str)[:80]}: {wanted}", spelled(path)
    )


def spelled(path: Sequence[str | int]) -> str:
    """As OpenAI writes it: messages[0].content."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
