"""The fields of requests: those of all APIs, and of OpenAI's, to which others translate."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeInt, ValidationInfo, model_validator

from ..chat import ASSISTANT
from ..engine import GenerationOptions
from ..engine.options import BIAS_RANGE, MAX_DRAFT_TOKENS, MAX_LOGPROBS, RANGES
from .bodies import STRICTLY, Body, RequestError, refuse
from .fields import ALIASES, IGNORED, NEUTRAL, REFUSED
from .parts import (
    MAX_PARTS,
    Effort,
    Message,
    Prediction,
    Reasoning,
    ResponseFormat,
    Thinking,
    Tool,
    ToolChoice,
    list_texts,
)

DEFAULT_TOKENS = 16  # OpenAI's, of a completion
MAX_CHOICES = 128  # of all prompts of a request together
MAX_MESSAGES = 2**16
MAX_TOOLS = 128
MAX_STOPS = 16  # OpenAI has 4; evaluations send more
MIN_TOP_P = 1e-12  # stands for OpenAI's 0: the likeliest token alone
NO_SEED = -1  # other servers' value for a random seed
# Fields whose options the engine calls otherwise
FIELDS_OF_OPTIONS = {"stop_ids": "stop_token_ids", "min_new_tokens": "min_tokens"}

Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[int], Field(fail_fast=True)]
UNTIL_THE_END = -1  # as a limit of new tokens, like null: the rest of the context
Limit = Annotated[
    Annotated[int, Field(ge=1)] | None,
    BeforeValidator(
        lambda value: None if type(value) is int and value == UNTIL_THE_END else value, int
    ),
]
Likeliest = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Biases = dict[
    Annotated[str, Field(pattern=r"^[0-9]+$")],
    Annotated[float, Field(ge=BIAS_RANGE[0], le=BIAS_RANGE[1])],
]


def wrap_text(value: Any) -> Any:
    if isinstance(value, str):
        return [value] if value else []
    return value


def check_prompts(value: Any) -> list[str | Ids]:
    # Checked here, not by pydantic, which would hold up all other threads
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        value = [value]
    prompts = value[:MAX_CHOICES] if isinstance(value, list) else [None]
    are_prompts = all(isinstance(prompt, str) or is_ids(prompt) for prompt in prompts)
    if not are_prompts or len(set(map(type, prompts))) > 1:
        raise ValueError("no prompts")
    return value


def is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(type(token) is int for token in prompt)


class Sampling(Body):
    """How tokens are drawn, in all APIs."""

    aliases = ALIASES

    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: Annotated[Biases, Field(max_length=MAX_PARTS)] = {}
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[
        list[Text], Field(max_length=MAX_STOPS), BeforeValidator(wrap_text, str | list[str])
    ] = []
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    # Beyond OpenAI's, by the names that other servers gave them
    top_k: Annotated[int, Field(ge=-1, le=RANGES["top_k"][2])] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    ignore_eos: bool = False
    min_tokens: NonNegativeInt = 0
    stop_token_ids: Ids = []
    speculate: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)] | None = None

    def generation_options(
        self, defaults: Mapping[str, Any], max_new_tokens: int, logprobs: int | None
    ) -> GenerationOptions:
        """Return the engine's options; `defaults` are for what the request leaves open."""
        # Fields of the same name
        names = Sampling.model_fields.keys() & GenerationOptions.__dataclass_fields__.keys()
        options = {**defaults, **self.model_dump(include=names, exclude_none=True)}
        options |= {
            "top_k": max(0, options.get("top_k", 0)),
            "top_p": max(MIN_TOP_P, options.get("top_p", 1.0)),
            "seed": secrets.randbits(64) if self.seed in (None, NO_SEED) else self.seed % 2**64,
            "logit_bias": {int(token): bias for token, bias in self.logit_bias.items()},
        }
        try:
            return GenerationOptions(
                **options,
                max_new_tokens=max_new_tokens,
                min_new_tokens=self.min_tokens,
                stop_ids=self.stop_token_ids,
                logprobs=logprobs,
            )
        except ValueError as error:
            raise make_option_error(error) from None


def make_option_error(error: ValueError) -> RequestError:
    """Return what a client is told about an option that the engine refuses."""
    # The engine's messages begin with the name of the option
    option, _, reason = str(error).partition(" ")
    name = FIELDS_OF_OPTIONS.get(option, option)
    return RequestError(f"{name} {reason}", name)


class StreamOptions(Body):
    place = "stream_options."
    ignored = {"include_obfuscation": [False]}

    include_usage: bool = False
    continuous_usage_stats: bool = False  # usage so far in every chunk


class Request(Sampling):
    """The fields that every API has."""

    ignored = IGNORED
    neutral = NEUTRAL
    refused = REFUSED

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @model_validator(mode="after")
    def _check_stream_options(self, info: ValidationInfo) -> Self:
        # Some clients always send it, so it is an error only with --strict
        if "stream_options" in self.model_fields_set and not self.stream:
            (info.context or STRICTLY).pass_over(
                "stream_options", "stream_options needs stream = true"
            )
        return self


class OpenAIRequest(Request):
    """The fields that OpenAI's two endpoints share."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    return_token_ids: bool = False


class CompletionRequest(OpenAIRequest):
    """/v1/completions."""

    prompt: Annotated[list[Any], BeforeValidator(check_prompts, str | list[str] | Ids | list[Ids])]
    best_of: int | None = None
    echo: bool = False
    logprobs: Likeliest | None = None
    max_tokens: Annotated[int, Field(ge=UNTIL_THE_END)] = DEFAULT_TOKENS

    @model_validator(mode="before")
    @classmethod
    def _read_null_limit(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("max_tokens", 0) is None:
            return {**data, "max_tokens": UNTIL_THE_END}
        return data

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.best_of not in (None, self.n):
            refuse(
                "best_of",
                f"best_of = {self.best_of} must equal n = {self.n}: every choice that is drawn is sent",
            )
        if self.max_tokens == 0 and not self.echo:
            refuse("max_tokens", "max_tokens = 0 needs echo = true; without, it must be at least 1")
        if not 1 <= (count := len(self.prompt) * self.n) <= MAX_CHOICES:
            refuse(
                "prompt",
                f"{len(self.prompt)} prompts, n = {self.n}: {count} choices; 1 to {MAX_CHOICES} fit",
            )
        return self


class ConversationRequest(OpenAIRequest):
    """/v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    logprobs: bool = False
    top_logprobs: Likeliest | None = None
    max_tokens: Limit = None
    max_completion_tokens: Limit = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = []
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormat = ResponseFormat()
    prediction: Prediction | None = None
    reasoning_effort: Effort | None = None
    # Beyond OpenAI's
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    reasoning: Reasoning = Reasoning()
    reasoning_budget: Annotated[int, Field(ge=-1)] | None = None  # tokens; -1: any number
    thinking: Thinking = Thinking()

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        max_completion = self.max_completion_tokens
        max_tokens = self.max_tokens
        if None not in (max_completion, max_tokens) and max_completion != max_tokens:
            refuse(
                "max_tokens",
                f"max_tokens = {max_tokens} contradicts max_completion_tokens = {max_completion}; send one of them",
            )
        self._check_tools()
        if self.top_logprobs and not self.logprobs:
            refuse("top_logprobs", "top_logprobs needs logprobs = true")
        if self.continue_final_message:
            self._check_continued()
        reserved_names = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
        for name in reserved_names & self.chat_template_kwargs.keys():
            refuse(
                "chat_template_kwargs",
                f"chat_template_kwargs has {name!r}, which is a field of the request itself",
            )
        self._set_reasoning()
        return self

    def _check_continued(self) -> None:
        last = self.messages[-1]
        reason = ""
        if self.add_generation_prompt:
            reason = "excludes add_generation_prompt, which is true by default; send it as false"
        elif last.role != ASSISTANT or last.tool_calls or not any(list_texts(last.content)):
            reason = "needs an assistant's text, without tool_calls, as the last message"
        elif self.response_format.type != "text":
            reason = "cannot be combined with response_format, which is the form of a whole answer"
        if reason:
            refuse("continue_final_message", f"continue_final_message {reason}")

    def _set_reasoning(self) -> None:
        effort = self.reasoning_effort or self.reasoning.effort
        variables: dict[str, Any] = {"reasoning_effort": effort} if effort else {}
        if effort == "none" or self.thinking.type == "disabled":
            variables = {"enable_thinking": False}
        # Variables in the request take precedence; templates ignore unknown variables
        self.chat_template_kwargs = variables | self.chat_template_kwargs
        if self.reasoning_budget is None:
            self.reasoning_budget = self.thinking.budget_tokens

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            refuse(
                "tools", f"tools has two functions of one name: {sorted(names)}; give each its own"
            )
        choice = self.tool_choice
        if isinstance(choice, ToolChoice) and choice.function.name not in names:
            refuse(
                "tool_choice",
                f"tool_choice names {choice.function.name!r}, but the tools are {names}",
            )
        if choice == "required" and not names:
            refuse("tool_choice", "tool_choice = 'required' needs tools")
