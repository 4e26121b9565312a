"""Tests of the other APIs' packages, Codex and Claude Code against a server with scripted answers."""

import json
import sys
from pathlib import Path

import pytest

from tests.laneformer.serve.clients.conftest import AGENTS, API_CLIENTS, output
from tests.laneformer.serve.conftest import start, write_model

pytestmark = pytest.mark.rotate
PRELUDE = """
import pytest
from tests.laneformer.serve.scripted import play
play({script!r}, pytest.MonkeyPatch())
"""


def write_call(name: str, **arguments: str) -> str:
    return (
        f"I look.\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    )


SCRIPT = [
    ("", "<think>They greet.</think>Hello there."),
    ("weather in Rome", f"<think>A tool.</think>{write_call('weather', city='Rome')}"),
    ("Use Read", write_call("Read", file_path="NOTE")),
    ("Use exec_command", write_call("exec_command", cmd="cat note.txt")),
    ("it is 21 degrees", "It is warm."),
    ("secret is seven", "The note says seven."),
]
ANTHROPIC = """
import json, sys, anthropic
client = anthropic.Anthropic(base_url=sys.argv[1], api_key="key", max_retries=0, _strict_response_validation=True)
options = dict(model="any", max_tokens=500)
hello = [{"role": "user", "content": "Hello"}]
whole = client.messages.create(messages=hello, system="Be kind.", **options)
with client.messages.stream(messages=hello, **options) as stream:
    texts = list(stream.text_stream)
    streamed = stream.get_final_message()
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"name": "weather", "description": "of a city", "input_schema": schema}]
messages = [{"role": "user", "content": "The weather in Rome?"}]
with client.messages.stream(messages=messages, tools=tools, **options) as stream:
    called = stream.get_final_message()
use = called.content[-1]
result = {"type": "tool_result", "tool_use_id": use.id, "content": "it is 21 degrees"}
messages += [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
end = client.messages.create(messages=messages, tools=tools, **options)
try:
    anthropic.Anthropic(base_url=sys.argv[1], api_key="wrong").messages.create(messages=hello, **options)
except anthropic.AuthenticationError:
    refused = True
count = client.messages.count_tokens(model="any", messages=hello).input_tokens
print(json.dumps([[b.type for b in whole.content], whole.content[-1].text, "".join(texts), streamed.stop_reason,
                  called.stop_reason, use.name, use.input, end.content[0].text, count > 5, refused]))
"""
OLLAMA = """
import json, sys, ollama
client = ollama.Client(host=sys.argv[1], headers={"Authorization": "Bearer key"})
hello = [{"role": "user", "content": "Hello"}]
whole = client.chat(model="tiny", messages=hello, think=True, options={"num_ctx": 4096, "temperature": 0.5})
parts = list(client.chat(model="tiny", messages=hello, stream=True))
def weather(city: str) -> str:
    "Of a city."
messages = [{"role": "user", "content": "The weather in Rome?"}]
called = client.chat(model="tiny", messages=messages, tools=[weather]).message
messages += [called, {"role": "tool", "tool_name": "weather", "content": "it is 21 degrees"}]
end = client.chat(model="tiny", messages=messages, tools=[weather], keep_alive="5m")
try:
    client.embed(model="tiny", input="a")
except ollama.ResponseError as error:
    refused = error.status_code
print(json.dumps([whole.message.content, whole.message.thinking, "".join(p.message.content for p in parts),
                  parts[-1].done_reason, called.tool_calls[0].function.arguments, end.message.content,
                  client.generate(model="tiny", prompt="Hello").response, client.list().models[0].model,
                  client.ps().models[0].model, client.show("tiny").capabilities, refused]))
"""
OPENAI_AGENTS = """
import asyncio, json, os, sys
from agents import Agent, Runner, function_tool, set_tracing_disabled
set_tracing_disabled(True)
@function_tool
def weather(city: str) -> str:
    "Of a city."
    return f"it is 21 degrees in {city}"
agent = Agent(name="a", instructions="Be kind.", tools=[weather], model="any")
async def ask():
    whole = await Runner.run(agent, "The weather in Rome?")
    run = Runner.run_streamed(agent, "The weather in Rome?")
    kinds = {event.type async for event in run.stream_events()}
    return whole.final_output, run.final_output, sorted(kinds)
print(json.dumps(asyncio.run(ask())))
"""


@pytest.fixture(scope="module")
def note(tmp_path_factory):
    path = tmp_path_factory.mktemp("work") / "note.txt"
    path.write_text("the secret is seven\n")
    return path


@pytest.fixture(scope="module")
def agent_server(note, tmp_path_factory):
    """Yield a server whose context holds the prompts of agents."""
    sizes = {"max_position_embeddings": 262_144}
    folder = write_model(tmp_path_factory.mktemp("served") / "long", **sizes)
    script = [(key, text.replace("NOTE", str(note))) for key, text in SCRIPT]
    server = start(folder, PRELUDE.format(script=script), api_key="key")
    yield server
    assert server.stop() == 0, server.output()


def run_client(agent_server, code, **environment):
    if not API_CLIENTS.is_dir():
        pytest.skip(f"no {API_CLIENTS}: make {API_CLIENTS.relative_to(Path.cwd())}")
    command = [sys.executable, "-c", code, agent_server.url]
    return json.loads(output(command, PYTHONPATH=str(API_CLIENTS), **environment).splitlines()[-1])


def test_anthropic(agent_server):
    assert run_client(agent_server, ANTHROPIC) == [
        *(["thinking", "text"], "Hello there.", "Hello there.", "end_turn"),
        *("tool_use", "weather", {"city": "Rome"}, "It is warm.", True, True),
    ]


def test_ollama(agent_server):
    assert run_client(agent_server, OLLAMA) == [
        *("Hello there.", "They greet.", "Hello there.", "stop", {"city": "Rome"}, "It is warm."),
        *("Hello there.", "tiny", "tiny", ["completion", "tools"], 400),
    ]


def test_openai_agents_by_their_default(agent_server):
    answers = run_client(
        agent_server, OPENAI_AGENTS, OPENAI_BASE_URL=f"{agent_server.url}/v1", OPENAI_API_KEY="key"
    )
    assert answers[:2] == ["It is warm.", "It is warm."]
    assert "raw_response_event" in answers[2]


def locate_agent(name: str) -> str:
    if not (AGENTS / name).exists():
        pytest.skip(f"no {AGENTS / name}: make .venv/agents")
    return str(AGENTS / name)


def test_codex(agent_server, note, tmp_path):
    (tmp_path / "config.toml").write_text(
        'model = "any"\nmodel_provider = "here"\n[model_providers.here]\nname = "here"\nwire_api = "responses"\n'
        f'base_url = "{agent_server.url}/v1"\nenv_key = "LANEFORMER_KEY"\n'
    )
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    options = {"CODEX_HOME": str(tmp_path), "LANEFORMER_KEY": "key"}
    printed = output(
        [locate_agent("codex"), "exec", *flags, "Use exec_command to read the note"],
        note.parent,
        **options,
    )
    assert printed.strip() == "The note says seven."


def test_claude_code(agent_server, note, tmp_path):
    options = {
        "HOME": str(tmp_path),
        "ANTHROPIC_BASE_URL": agent_server.url,
        "ANTHROPIC_AUTH_TOKEN": "key",
        "ANTHROPIC_MODEL": "any",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    printed = output(
        [locate_agent("claude"), "-p", "Use Read to read the note"], note.parent, **options
    )
    assert printed.strip() == "The note says seven."
