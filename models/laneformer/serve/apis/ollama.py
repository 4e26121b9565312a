"""Ollama's API: /api/chat and /api/generate, and what its clients ask about the model."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ...chat import ASSISTANT, SYSTEM, USER
from ..bodies import Body, RequestError
from ..context import ServingContext
from ..conversation import Block
from ..endpoints import Endpoints
from ..schema import Objects, arguments_of
from ..sending import Answer, ClientError
from .blocks import BlockAnswer, TranslatedRequest, function_call

VERSION = "0.14.0"  # of the API, which clients compare
FOR_EVER = "9999-12-31T23:59:59Z"
SECOND_NS = 1e9


class Message(Body):
    place = "messages[]."

    role: str
    content: str = ""
    thinking: str | None = None
    images: list[Any] = []
    tool_calls: Objects = []
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaRequest(TranslatedRequest):
    """What /api/chat and /api/generate have in common."""

    unused = {"keep_alive": None, "truncate": None, "shift": None}
    neutral = {"logprobs": [False], "top_logprobs": [0]}

    stream: bool = True
    options: dict[str, Any] = {}
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None

    def common(self) -> dict[str, Any]:
        """Of a chat completion. Options about the machine, which those do not know, have no effect."""
        form: Any = None
        if self.format == "json":
            form = {"type": "json_object"}
        elif self.format:
            form = {"type": "json_schema", "json_schema": {"name": "format", "schema": self.format}}
        options = dict(self.options)
        if (limit := options.pop("num_predict", None)) is not None:
            options["max_tokens"] = max(limit, -1) if isinstance(limit, int) else limit
        think: Any = None if self.think is None else {"enable_thinking": self.think is not False}
        think = {**think, "reasoning_effort": self.think} if isinstance(self.think, str) else think
        return {**options, "response_format": form, "chat_template_kwargs": think}


class ChatRequest(OllamaRequest):
    messages: list[Message] = []
    tools: Objects = []

    def fields(self) -> dict[str, Any]:
        messages = [translate_message(message) for message in self.messages]
        return {**self.common(), "tools": self.tools, "messages": messages}


class GenerateRequest(OllamaRequest):
    refused = {
        "suffix": "the model fills no gaps",
        "template": "the model's own is used",
        "context": "send the conversation to /api/chat",
    }
    neutral = {**OllamaRequest.neutral, "raw": [False], "images": [[]]}

    prompt: str = ""
    system: str | None = None

    def fields(self) -> dict[str, Any]:
        system = [{"role": SYSTEM, "content": self.system}] if self.system else []
        return {**self.common(), "messages": [*system, {"role": USER, "content": self.prompt}]}


def translate_message(sent: Message) -> dict[str, Any]:
    if sent.images:
        raise RequestError("images: the model reads text only", "messages")
    message: dict[str, Any] = {"role": sent.role, "content": sent.content}
    message |= {"reasoning_content": sent.thinking} if sent.thinking else {}
    if sent.role == "tool":
        message |= {"name": sent.tool_name, "tool_call_id": sent.tool_call_id}
    if calls := [one.get("function") or {} for one in sent.tool_calls]:
        message["tool_calls"] = [
            function_call(None, c.get("name"), json.dumps(c.get("arguments") or {})) for c in calls
        ]
    return message


class OllamaAnswer(BlockAnswer):
    """Lines of JSON; calls come as a whole."""

    media, silence = "application/x-ndjson", " "

    def __init__(self, request: ChatRequest | GenerateRequest, context: ServingContext):
        super().__init__(request, context)
        self.chat = isinstance(request, ChatRequest)

    def line(self, text: str, thinking: str, calls: list[Block], **more: Any) -> dict[str, Any]:
        fixed = {"model": self.model, "created_at": now()}
        thought = {"thinking": thinking} if thinking else {}
        if not self.chat:
            return {**fixed, "response": text, **thought, "done": False, **more}
        tool_calls = [{"function": {"name": c.name, "arguments": arguments_of(c.text)}} for c in calls]
        message = {
            "role": ASSISTANT,
            "content": text,
            **thought,
            **({"tool_calls": tool_calls} if tool_calls else {}),
        }
        return {**fixed, "message": message, "done": False, **more}

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
        text, thinking = self.answer.text_of("text"), self.answer.text_of("reasoning")
        return self.line(text, thinking, self.answer.calls(), **self.end())

    def more(self, block: Block, text: str) -> str:
        if block.kind == "call":
            return ""
        both = (text, "") if block.kind == "text" else ("", text)
        return json.dumps(self.line(*both, [])) + "\n"

    def end_of(self, block: Block) -> str:
        return json.dumps(self.line("", "", [block])) + "\n" if block.kind == "call" else ""

    def closing(self) -> str:
        return json.dumps(self.line("", "", [], **self.end())) + "\n"

    def failure_events(self, error: ClientError) -> str:
        return json.dumps(error.body("/api/")) + "\n"


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def answer(request: ChatRequest | GenerateRequest, context: ServingContext) -> Answer | dict[str, Any]:
    """Without a message it is asked whether the model is loaded."""
    if not (request.messages if isinstance(request, ChatRequest) else request.prompt):
        chat = isinstance(request, ChatRequest)
        empty = {"message": {"role": ASSISTANT, "content": ""}} if chat else {"response": ""}
        return {"model": request.model, "created_at": now(), **empty, "done": True, "done_reason": "load"}
    return OllamaAnswer(request, context)


class ShowRequest(Body):
    unused = {"verbose": None, "name": None}

    model: str | None = None


def add(endpoints: Endpoints, facts: Mapping[str, Any]) -> None:
    """Its routes. facts: of the model, as /props tells them."""
    app, context = endpoints.app, endpoints.context
    details = {
        "parent_model": "", "format": "gguf", "family": "llama", "families": ["llama"], "parameter_size": "",
        "quantization_level": str(facts["dtype"]).upper(),
    }  # fmt: skip
    model = {
        "name": context.model, "model": context.model, "modified_at": now(), "size": facts["weight_bytes"],
        "digest": context.fingerprint.removeprefix("fp_"), "details": details,
    }  # fmt: skip
    info = {"general.architecture": "llama", "llama.context_length": context.context_tokens}
    can = ["completion", "tools"] if facts["chat"] else ["completion"]
    shown = {"modified_at": model["modified_at"], "details": details, "model_info": info, "capabilities": can}
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
