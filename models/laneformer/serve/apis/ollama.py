"""Ollama's API: /api/chat and /api/generate, and what its clients ask about the model."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from ...chat import ASSISTANT, SYSTEM, USER
from ..bodies import Body
from ..context import ServingContext
from ..conversation import Block
from ..endpoints import Endpoints
from ..fields import HARMLESS, NEUTRAL, REFUSED, RENAMED
from ..parts import Objects, arguments_of
from ..schema import Sampling
from ..sending import Answer, ClientError
from .blocks import BlockAnswer, TranslatedRequest, function_call, sampling_of

VERSION = "0.14.0"  # of the API, which clients compare
FOR_EVER = "9999-12-31T23:59:59Z"
SECOND_NS = 1e9


class Message(Body):
    place, is_open = "messages[].", True
    refused = {"images": REFUSED["images"]}

    role: str
    content: str = ""
    thinking: str | None = None
    tool_calls: Objects = []
    tool_name: str | None = None
    tool_call_id: str | None = None


class Options(Sampling):
    """Of one request; those that nobody knows have no effect, as in Ollama."""

    place, is_open, typo = "options.", True, 1.0
    harmless, neutral = HARMLESS, NEUTRAL
    refused = {**REFUSED, "format": "send it beside the options"}
    renamed = {**RENAMED, "num_predict": "max_tokens"}

    max_tokens: Annotated[
        int | None, AfterValidator(lambda most: most if most and most > 0 else None)
    ] = None


class OllamaRequest(TranslatedRequest):
    """What /api/chat and /api/generate have in common."""

    own_names = {r"^messages\S*": "messages", r"^response_format(\.schema)?": "format"}

    stream: bool = True
    options: Options = Options()
    format: Literal["json", ""] | dict[str, Any] = ""
    think: bool | str | None = None

    def fields(self) -> dict[str, Any]:
        form: dict[str, Any] = {"schema": self.format} if isinstance(self.format, dict) else {}
        variables = {} if self.think is None else {"enable_thinking": self.think is not False}
        return {
            **sampling_of(self.options),
            "messages": self.messages_of_chat(),
            "response_format": {"type": "json_object", **form} if self.format else {},
            "chat_template_kwargs": variables,
            "reasoning_effort": self.think if isinstance(self.think, str) else None,
        }

    def messages_of_chat(self) -> list[dict[str, Any]]:
        raise NotImplementedError


class ChatRequest(OllamaRequest):
    messages: list[Message] = []
    tools: Objects = []

    def fields(self) -> dict[str, Any]:
        return {**super().fields(), "tools": self.tools}

    def messages_of_chat(self) -> list[dict[str, Any]]:
        return [translate_message(message) for message in self.messages]


class GenerateRequest(OllamaRequest):
    own_names = {**OllamaRequest.own_names, r"^messages": "prompt"}

    prompt: str = ""
    system: str = ""

    def messages_of_chat(self) -> list[dict[str, Any]]:
        system = [{"role": SYSTEM, "content": self.system}] if self.system else []
        return [*system, {"role": USER, "content": self.prompt}]


def translate_message(sent: Message) -> dict[str, Any]:
    calls = [call.get("function") or {} for call in sent.tool_calls]
    return {
        "role": sent.role,
        "content": sent.content,
        "reasoning_content": sent.thinking,
        "name": sent.tool_name,
        "tool_call_id": sent.tool_call_id,
        "tool_calls": [
            function_call(None, call.get("name"), json.dumps(call.get("arguments") or {}))
            for call in calls
        ],
    }


class OllamaAnswer(BlockAnswer):
    """Lines of JSON; calls come as a whole."""

    media, silence = "application/x-ndjson", " "

    def __init__(self, request: ChatRequest | GenerateRequest, context: ServingContext):
        super().__init__(request, context)
        self.line = partial(line_of, isinstance(request, ChatRequest), self.model)

    def end(self) -> dict[str, Any]:
        used, now_s = self.used, time.time()
        first_s = self.first_s or now_s
        return {
            "done": True,
            "done_reason": "length" if self.finish_reason == "length" else "stop",
            "total_duration": round((now_s - self.begun_s) * SECOND_NS),
            "load_duration": 0,
            "prompt_eval_count": used["prompt_tokens"],
            "prompt_eval_duration": round((first_s - self.begun_s) * SECOND_NS),
            "eval_count": used["completion_tokens"],
            "eval_duration": round((now_s - first_s) * SECOND_NS),
        }

    def whole_answer(self) -> dict[str, Any]:
        answer = self.answer
        return self.line(
            answer.text_of("text"), answer.text_of("reasoning"), answer.calls(), **self.end()
        )

    def more(self, block: Block, text: str) -> str:
        if block.kind == "call":
            return ""
        line = self.line(text) if block.kind == "text" else self.line(thinking=text)
        return json.dumps(line) + "\n"

    def end_of(self, block: Block) -> str:
        return json.dumps(self.line(calls=[block])) + "\n" if block.kind == "call" else ""

    def closing(self) -> str:
        return json.dumps(self.line(**self.end())) + "\n"

    def failure_events(self, error: ClientError) -> str:
        return json.dumps(error.body("/api/")) + "\n"


def line_of(
    chat: bool,
    model: str | None,
    text: str = "",
    thinking: str = "",
    calls: Sequence[Block] = (),
    **more: Any,
) -> dict[str, Any]:
    """A part of an answer, or all of it."""
    answer: dict[str, Any] = {
        "content" if chat else "response": text,
        **({"thinking": thinking} if thinking else {}),
    }
    if chat:
        tool_calls = [
            {"function": {"name": c.name, "arguments": arguments_of(c.text)}} for c in calls
        ]
        answer = {
            "message": {
                "role": ASSISTANT,
                **answer,
                **({"tool_calls": tool_calls} if calls else {}),
            }
        }
    return {"model": model, "created_at": now(), **answer, "done": False, **more}


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def answer(
    request: ChatRequest | GenerateRequest, context: ServingContext
) -> Answer | dict[str, Any]:
    """Without a message it is asked whether the model is loaded."""
    asked = request.messages if isinstance(request, ChatRequest) else request.prompt
    if not asked:
        return line_of(
            isinstance(request, ChatRequest), request.model, done=True, done_reason="load"
        )
    return OllamaAnswer(request, context)


class ShowRequest(Body):
    is_open, harmless = True, {"verbose": None, "name": None}

    model: str | None = None


def add(endpoints: Endpoints, facts: Mapping[str, Any]) -> None:
    """Its routes. facts: of the model, as /props tells them."""
    app, context = endpoints.app, endpoints.context
    details = {
        "parent_model": "",
        "format": "gguf",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "",
        "quantization_level": str(facts["dtype"]).upper(),
    }
    model = {
        "name": context.model,
        "model": context.model,
        "modified_at": now(),
        "size": facts["weight_bytes"],
        "digest": context.fingerprint.removeprefix("fp_"),
        "details": details,
    }
    info = {"general.architecture": "llama", "llama.context_length": context.context_tokens}
    can = ["completion", "tools"] if facts["chat"] else ["completion"]
    shown = {
        "modified_at": model["modified_at"],
        "details": details,
        "model_info": info,
        "capabilities": can,
    }
    endpoints.add("/api/chat", ChatRequest, answer, any_type=True)
    endpoints.add("/api/generate", GenerateRequest, answer, any_type=True)
    endpoints.add("/api/show", ShowRequest, lambda body, context: shown, any_type=True)

    @app.get("/api/tags")
    async def tags() -> dict[str, Any]:
        return {"models": [model]}

    @app.get("/api/ps")
    async def running() -> dict[str, Any]:
        loaded = {"expires_at": FOR_EVER, "size_vram": 0, "context_length": context.context_tokens}
        return {"models": [{**model, **loaded}]}

    @app.get("/api/version")
    async def version() -> dict[str, str]:
        return {"version": VERSION}
