"""Bodies that twelve programs send by default, written after their sources and not recorded."""

from __future__ import annotations

from typing import Any

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hello, how are you?"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Hello, how are you?"}]}
CALL = {"id": "call_1", "type": "function", "function": {"name": "ls", "arguments": '{"path": "."}'}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "README.md"}
TOOL = {
    "type": "function",
    "function": {
        "name": "ls",
        "description": "List files",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
USAGE = {"include_usage": True}
STREAM = {"stream": True, "stream_options": USAGE}
NEUTRAL = {"top_p": 1, "presence_penalty": 0, "frequency_penalty": 0}

BODIES: dict[str, list[dict[str, Any]]] = {
    "Continue": [
        {"messages": [SYSTEM, PARTS], "model": "tiny", "max_tokens": 4096, "stream": True},
        {
            "messages": [SYSTEM, USER, {"role": "assistant", "content": " ", "tool_calls": [CALL]}, RESULT],
            "model": "tiny", "max_tokens": 4096, "temperature": 0.5, **STREAM, "tools": [TOOL],
            "parallel_tool_calls": False,
        },
    ],
    "Cline": [
        {"model": "tiny", "messages": [SYSTEM, PARTS, {"role": "assistant", "content": None}, PARTS],
         "temperature": 0, **STREAM},
        {"model": "tiny", "messages": [SYSTEM, PARTS], "temperature": 0, "max_tokens": -1, "reasoning_effort": "low",
         **STREAM, "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False},
    ],
    "Zed": [
        {
            "model": "tiny", **STREAM, "max_completion_tokens": 8192, "stop": [], "temperature": 1.0,
            "tool_choice": "auto", "parallel_tool_calls": False, "prompt_cache_key": "thread", "tools": [TOOL],
            "messages": [SYSTEM, PARTS, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT],
        },
    ],
    "Open WebUI": [
        {"stream": True, "model": "tiny", "messages": [{**USER, "id": "4a1"}], **STREAM},
        {"model": "tiny", "messages": [USER], "stream": False, "max_completion_tokens": 1000,
         "metadata": {"task": "title_generation", "chat_id": "1"}},
        {"model": "tiny", "messages": [USER], "stream": True, "keep_alive": "5m", "num_ctx": 2048, "temperature": 0.8,
         "repeat_penalty": 1.1, "mirostat": 0},
    ],
    "LM Studio": [
        {"model": "tiny", "messages": [SYSTEM, USER], "temperature": 0.7, "max_tokens": -1, "stream": True},
        {"model": "tiny", "messages": [SYSTEM, USER], "max_tokens": -1, "stream": False, "ttl": 300,
         "top_k": 40, "repeat_penalty": 1.1},
    ],
    "aider": [{"model": "tiny", "messages": [SYSTEM, USER, {"role": "assistant", "content": "Ok."}, USER],
               "temperature": 0, "stream": True}],
    "LibreChat": [{"model": "tiny", "user": "64f", **STREAM, **NEUTRAL, "n": 1, "temperature": 1,
                   "messages": [SYSTEM, {**USER, "name": "Ada"}]}],
    "langchain": [
        {"messages": [SYSTEM, USER], "model": "tiny", "stream": False, "max_completion_tokens": 64, "n": 1,
         "reasoning_effort": "low", "verbosity": "low", "service_tier": "flex"},
        {"messages": [USER, {"content": None, "role": "assistant", "tool_calls": [CALL]}, RESULT], "model": "tiny",
         "tools": [TOOL], **STREAM},
    ],
    "litellm": [{"model": "tiny", "messages": [USER], "temperature": 0, "max_tokens": 24, "reasoning_effort": "low",
                 "thinking": {"type": "enabled", "budget_tokens": 1024}, "drop_params": True}],
    "llama-index": [
        {"messages": [USER], "model": "tiny", "stream": True, "temperature": 0.1, "max_tokens": 3000},
        {"messages": [USER], "model": "tiny", "stream": False, "temperature": 0.1, "tools": [TOOL],
         "tool_choice": "auto", "parallel_tool_calls": True},
    ],
    "openai-agents": [
        {"messages": [{"content": "Be brief.", "role": "system"}, USER], "model": "tiny", "stream": False,
         "store": True,
         "tools": [TOOL], "reasoning_effort": "medium", "verbosity": "medium", "prompt_cache_retention": "24h",
         "metadata": {"trace": "1"}, "stream_options": USAGE, "parallel_tool_calls": False, "top_logprobs": None},
    ],
    "Vercel AI SDK": [
        {"model": "tiny", "messages": [SYSTEM, USER, {"role": "assistant", "content": "", "reasoning_content": "Hm.",
                                                      "tool_calls": [CALL]}, RESULT],
         "max_tokens": 100_000, "temperature": 0, "tools": [TOOL], "tool_choice": "auto", **STREAM},
        {"model": "tiny", "messages": [USER], "response_format": {"type": "json_object"}, "verbosity": "low",
         "reasoning_effort": "high", "user": "me"},
    ],
}  # fmt: skip
