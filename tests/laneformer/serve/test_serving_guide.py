"""Tests of docs/serving.md: its examples run on a real server, its tables list every route and field."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from laneformer.cli import main
from laneformer.serve.fields import REFUSED
from laneformer.serve.options import ServerOptions
from laneformer.serve.schema import CompletionRequest, ConversationRequest
from tests.laneformer.serve.conftest import ROOT, start
from tests.laneformer.serve.endpoint import data_of

GUIDE = (ROOT / "docs" / "serving.md").read_text()
NAME = "SmolLM2-135M-Instruct"  # of the model in the examples
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", GUIDE, re.S | re.M)
SHELL, PYTHON = (
    [text for kind, text in BLOCKS if kind == language] for language in ("bash", "python")
)
CURL = [command for text in SHELL for command in re.findall(r"^curl .*?'$", text, re.S | re.M)]
CLIENTS = Path(sys.prefix) / "clients"
needs_clients = pytest.mark.skipif(
    not CLIENTS.is_dir(), reason=f"no litellm: make .venv/{CLIENTS.name}"
)


@pytest.fixture(scope="module")
def guide_server(model_folder):
    server = start(model_folder, model_name=NAME)
    yield server
    assert server.stop() == 0, server.output()


def run(command, code, server) -> str:
    text = code.replace("http://localhost:8000", server.url)
    environment = {"PYTHONPATH": str(CLIENTS)} if "import litellm" in code else {}
    process = subprocess.run(
        [*command, text], capture_output=True, text=True, timeout=300, env=os.environ | environment
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.job
def test_curl(guide_server):
    answers = [run(["bash", "-c"], f"{command} -sSf", guide_server) for command in CURL]
    conversation, scored, streamed, tokens = answers
    assert json.loads(conversation)["choices"][0]["message"]["role"] == "assistant"
    first, *others = json.loads(scored)["choices"][0]["logprobs"]["token_logprobs"]
    assert first is None
    assert all(score < 0 for score in others)
    *_, last, end = data_of(streamed)
    assert end == "[DONE]"
    assert json.loads(last)["usage"]["completion_tokens"] <= 20
    assert json.loads(tokens)["tokens"]


def marks(code: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.rotate, needs_clients] if "import litellm" in code else [pytest.mark.job]


@pytest.mark.parametrize(
    "code", [pytest.param(code, marks=marks(code), id=str(i)) for i, code in enumerate(PYTHON)]
)
def test_python(guide_server, code):
    assert run([sys.executable, "-c"], code, guide_server).strip()


def test_settings_of_programs_can_be_read():
    import yaml

    (settings,) = (yaml.safe_load(text) for kind, text in BLOCKS if kind == "yaml")
    assert settings["models"][0]["apiBase"] == "http://localhost:8000/v1"


def test_every_route_field_and_flag_is_told(tiny, capsys):
    for route in tiny.get("/openapi.json").json()["paths"]:
        assert f"{route.replace('{name}', 'NAME')}`" in GUIDE, route
    for request in (CompletionRequest, ConversationRequest):
        for name in {*request.field_names, *REFUSED}:
            assert f"`{name}`" in GUIDE or f"`{name}: " in GUIDE or f" {name} " in GUIDE, name
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    flags = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    options = ServerOptions.__dataclass_fields__.keys()
    assert {f"--{name.replace('_', '-')}" for name in options} <= flags
    # and no command of the guide has a flag that is not there
    for text in re.findall(r"laneformer serve [^\n|]*", GUIDE):
        assert set(re.findall(r"--[a-z][a-z-]+", text)) <= flags, text
