"""Ollama's API: /api/chat, /api/generate, and what its clients ask about the model."""

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
from ..fields import ALIASES, IGNORED, NEUTRAL, REFUSED, SILENT
from ..parts import Objects, parse_arguments
from ..schema import Sampling
from ..sending import Answer, ClientError
from .blocks import BlockAnswer, TranslatedRequest, make_call, pick_sampling

VERSION = "0.14.0"  # of Ollama; clients compare it
NEVER = "9999-12-31T23:59:59Z"
SECOND_NS = 1e9


class Message(Body):
    place = "messages[]."
    is_open = True
    refused = {"images": REFUSED["images"]}

    role: str
    content: str = ""
    thinking: str | None = None
    tool_calls: Objects = []
    tool_name: str | None = None
    tool_call_id: str | None = None


class Options(Sampling):
    """Ollama's options of one request; as there, unknown ones have no effect."""

    place = "options."
    is_open = True
    typo = 1.0
    ignored = IGNORED
    neutral = NEUTRAL
    refused = {**REFUSED, "format": "send it beside the options"}
    aliases = {**ALIASES, "num_predict": "max_tokens"}

    max_tokens: Annotated[
        int | None, AfterValidator(lambda most: most if most and most > 0 else None)
    ] = None


class OllamaRequest(TranslatedRequest):
    """What /api/chat and /api/generate share."""

    api_names = {r"^messages\S*": "messages", r"^response_format(\.schema)?": "format"}

    stream: bool = True
    options: Options = Options()
    format: Literal["json", ""] | dict[str, Any] = ""
    think: bool | str | None = None

    def translate_fields(self) -> dict[str, Any]:
        form: dict[str, Any] = {"schema": self.format} if isinstance(self.format, dict) else {}
        variables = {} if self.think is None else {"enable_thinking": self.think is not False}
        return {
            **pick_sampling(self.options),
            "messages": self.translate_messages(),
            "response_format": {"type": "json_object", **form} if self.format else {},
            "chat_template_kwargs": variables,
            "reasoning_effort": self.think if isinstance(self.think, str) else None,
        }

    def translate_messages(self) -> list[dict[str, Any]]:
        raise NotImplementedError


class ChatRequest(OllamaRequest):
    messages: list[Message] = []
    tools: Objects = []

    def translate_fields(self) -> dict[str, Any]:
        return {**super().translate_fields(), "tools": self.tools}

    def translate_messages(self) -> list[dict[str, Any]]:
        return [translate_message(message) for message in self.messages]


class GenerateRequest(OllamaRequest):
    api_names = {**OllamaRequest.api_names, r"^messages": "prompt"}

    prompt: str = ""
    system: str = ""

    def translate_messages(self) -> list[dict[str, Any]]:
        system = [{"role": SYSTEM, "content": self.system}] if self.system else []
        return [*system, {"role": USER, "content": self.prompt}]


def translate_message(message: Message) -> dict[str, Any]:
    calls = [call.get("function") or {} for call in message.tool_calls]
    return {
        "role": message.role,
        "content": message.content,
        "reasoning_content": message.thinking,
        "name": message.tool_name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": [
            make_call(None, call.get("name"), json.dumps(call.get("arguments") or {}))
            for call in calls
        ],
    }


class OllamaAnswer(BlockAnswer):
    """Lines of JSON; a call comes as a whole."""

    media = "application/x-ndjson"
    silence = " "

    def __init__(self, request: ChatRequest | GenerateRequest, context: ServingContext):
        super().__init__(request, context)
        self.line = partial(format_line, isinstance(request, ChatRequest), self.model)

    def format_end(self) -> dict[str, Any]:
        usage = self.choices.count_usage()
        now_s = time.time()
        first_s = self.first_s or now_s
        return {
            "done": True,
            "done_reason": "length" if self.finish_reason == "length" else "stop",
            "total_duration": round((now_s - self.begun_s) * SECOND_NS),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": round((first_s - self.begun_s) * SECOND_NS),
            "eval_count": usage.completion,
            "eval_duration": round((now_s - first_s) * SECOND_NS),
        }

    def format_answer(self) -> dict[str, Any]:
        answer = self.answer
        return self.line(
            answer.join_text("text"),
            answer.join_text("reasoning"),
            answer.list_calls(),
            **self.format_end(),
        )

    def write_text(self, block: Block, text: str) -> str:
        if block.kind == "call":
            return ""
        line = self.line(text) if block.kind == "text" else self.line(thinking=text)
        return json.dumps(line) + "\n"

    def close_block(self, block: Block) -> str:
        return json.dumps(self.line(calls=[block])) + "\n" if block.kind == "call" else ""

    def close_stream(self) -> str:
        return json.dumps(self.line(**self.format_end())) + "\n"

    def write_failure(self, error: ClientError) -> str:
        return json.dumps(error.format_body("/api/")) + "\n"


def format_line(
    chat: bool,
    model: str | None,
    text: str = "",
    thinking: str = "",
    calls: Sequence[Block] = (),
    **more: Any,
) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "content" if chat else "response": text,
        **({"thinking": thinking} if thinking else {}),
    }
    if chat:
        tool_calls = [
            {"function": {"name": c.name, "arguments": parse_arguments(c.text)}} for c in calls
        ]
        answer = {
            "message": {
                "role": ASSISTANT,
                **answer,
                **({"tool_calls": tool_calls} if calls else {}),
            }
        }
    return {"model": model, "created_at": format_now(), **answer, "done": False, **more}


def format_now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def make_answer(
    request: ChatRequest | GenerateRequest, context: ServingContext
) -> Answer | dict[str, Any]:
    is_chat = isinstance(request, ChatRequest)
    if not (request.messages if isinstance(request, ChatRequest) else request.prompt):
        # Clients send an empty request to have the model loaded
        return format_line(is_chat, request.model, done=True, done_reason="load")
    return OllamaAnswer(request, context)


class ShowRequest(Body):
    is_open = True
    ignored = {"verbose": SILENT, "name": SILENT}

    model: str | None = None


def add_routes(endpoints: Endpoints, facts: Mapping[str, Any]) -> None:
    """Add the routes; `facts` describe the model, as in /props."""
    app = endpoints.app
    context = endpoints.context
    # Clients read these to decide what the model can do; it need not be a GGUF file
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
        "modified_at": format_now(),
        "size": facts["weight_bytes"],
        "digest": context.fingerprint.removeprefix("fp_"),
        "details": details,
    }
    info = {"general.architecture": "llama", "llama.context_length": context.context_tokens}
    capabilities = ["completion", "tools"] if facts["chat"] else ["completion"]
    model_card = {
        "modified_at": model["modified_at"],
        "details": details,
        "model_info": info,
        "capabilities": capabilities,
    }
    endpoints.add("/api/chat", ChatRequest, make_answer, any_type=True)
    endpoints.add("/api/generate", GenerateRequest, make_answer, any_type=True)
    endpoints.add("/api/show", ShowRequest, lambda body, context: model_card, any_type=True)

    @app.get("/api/tags")
    async def tags() -> dict[str, Any]:
        return {"models": [model]}

    @app.get("/api/ps")
    async def running() -> dict[str, Any]:
        loaded = {"expires_at": NEVER, "size_vram": 0, "context_length": context.context_tokens}
        return {"models": [{**model, **loaded}]}

    @app.get("/api/version")
    async def version() -> dict[str, str]:
        return {"version": VERSION}
