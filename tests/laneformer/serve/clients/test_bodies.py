"""What twelve programs send by default is answered: written after their sources, and not recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.laneformer.serve.conftest import in_process
from tests.laneformer.serve.endpoint import data_of

if TYPE_CHECKING:
    from fastapi.testclient import TestClient

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hello, how are you?"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Hello, how are you?"}]}
CALL = {"id": "call_1", "type": "function", "function": {"name": "ls", "arguments": '{"path": "."}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "README.md"}
PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOL = {"type": "function", "function": {"name": "ls", "description": "List files", "parameters": PATH}}
TOOLS: dict[str, Any] = {"tools": [TOOL], "tool_choice": "auto"}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
BODIES: dict[str, list[dict[str, Any]]] = {
    "Continue": [
        {"messages": [SYSTEM, PARTS], "max_tokens": 4096, "stream": True},
        {"messages": [SYSTEM, USER, {**CALLED, "content": " "}, RESULT], "max_tokens": 4096, "temperature": 0.5,
         **STREAM, "tools": [TOOL], "parallel_tool_calls": False},
    ],
    "Cline": [
        {"messages": [SYSTEM, PARTS, {"role": "assistant", "content": None}, PARTS], "temperature": 0, **STREAM},
        {"messages": [SYSTEM, PARTS], "max_tokens": -1, "reasoning_effort": "low", **STREAM, **TOOLS},
    ],
    "Zed": [
        {**STREAM, "max_completion_tokens": 8192, "stop": [], "temperature": 1.0, "parallel_tool_calls": False,
         "prompt_cache_key": "thread", **TOOLS, "messages": [SYSTEM, PARTS, CALLED, RESULT]},
    ],
    "Open WebUI": [
        {"messages": [{**USER, "id": "4a1"}], **STREAM},
        {"messages": [USER], "stream": False, "max_completion_tokens": 1000,
         "metadata": {"task": "title_generation", "chat_id": "1"}},
        {"messages": [USER], "stream": True, "keep_alive": "5m", "num_ctx": 2048, "temperature": 0.8,
         "repeat_penalty": 1.1, "mirostat": 0},
    ],
    "LM Studio": [
        {"messages": [SYSTEM, USER], "max_tokens": -1, "stream": False, "ttl": 300, "top_k": 40, "repeat_penalty": 1.1},
    ],
    "aider": [{"messages": [SYSTEM, USER, {"role": "assistant", "content": "Ok."}, USER], "temperature": 0,
               "stream": True}],
    "LibreChat": [{"user": "64f", **STREAM, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "n": 1,
                   "messages": [SYSTEM, {**USER, "name": "Ada"}]}],
    "langchain": [
        {"messages": [SYSTEM, USER], "stream": False, "max_completion_tokens": 64, "n": 1, "reasoning_effort": "low",
         "verbosity": "low", "service_tier": "flex"},
        {"messages": [USER, CALLED, RESULT], "tools": [TOOL], **STREAM},
    ],
    "litellm": [{"messages": [USER], "temperature": 0, "max_tokens": 24, "reasoning_effort": "low",
                 "thinking": {"type": "enabled", "budget_tokens": 1024}, "drop_params": True}],
    "llama-index": [
        {"messages": [USER], "stream": False, "temperature": 0.1, **TOOLS, "parallel_tool_calls": True},
    ],
    "openai-agents": [
        {"messages": [SYSTEM, USER], "stream": False, "store": True, "tools": [TOOL], "reasoning_effort": "medium",
         "verbosity": "medium", "prompt_cache_retention": "24h", "metadata": {"trace": "1"},
         "stream_options": {"include_usage": True}, "parallel_tool_calls": False, "top_logprobs": None},
    ],
    "Vercel AI SDK": [
        {"messages": [SYSTEM, USER, {**CALLED, "content": "", "reasoning_content": "Hm."}, RESULT],
         "max_tokens": 100_000, "temperature": 0, **TOOLS, **STREAM},
        {"messages": [USER], "response_format": {"type": "json_object"}, "verbosity": "low",
         "reasoning_effort": "high", "user": "me"},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def client(model_folder: Path) -> Iterator[TestClient]:
    with in_process(model_folder, engine={"context_tokens": 1024}) as client:  # room for tools
        yield client


@pytest.mark.parametrize("program", BODIES)
def test_answered(client: TestClient, program: str) -> None:
    for body in BODIES[program]:
        answer = client.post("/v1/chat/completions", json={"model": "tiny", **body})
        assert answer.status_code == 200, answer.text
        events = data_of(answer.text)[:-1] if body.get("stream") else [answer.text]
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        assert {"stop", "length", "tool_calls"} & {choice["finish_reason"] for choice in choices}
