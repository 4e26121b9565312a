"""docs/serving.md says what is there: its examples run against a real server, its tables hold
every route and field.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from laneformer.cli import main
from laneformer.serve.options import ServerOptions
from laneformer.serve.schema import CompletionRequest, ConversationRequest
from tests.laneformer.serve.conftest import ROOT, Server, start

GUIDE = (ROOT / "docs" / "serving.md").read_text()
NAME = "SmolLM2-135M-Instruct"  # of the model in the examples
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", GUIDE, re.S | re.M)
CURL = [
    command
    for kind, text in BLOCKS
    if kind == "bash"
    for command in re.findall(r"^curl .*?'$", text, re.S | re.M)
]
PYTHON = [text for kind, text in BLOCKS if kind == "python"]


@pytest.fixture(scope="module")
def served(model_folder: Path) -> Iterator[Server]:
    server = start(model_folder, model=NAME)
    yield server
    assert server.stop() == 0, server.output()


def run(command: list[str], code: str, server: Server, **environment: str) -> str:
    text = code.replace("http://localhost:8000", server.url)
    done = subprocess.run(
        [*command, text], capture_output=True, text=True, timeout=300, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_curl(served: Server) -> None:
    conversation, scored, streamed, tokens = (
        run(["bash", "-c"], f"{command} -sSf", served) for command in CURL
    )
    assert json.loads(conversation)["choices"][0]["message"]["role"] == "assistant"
    first, *others = json.loads(scored)["choices"][0]["logprobs"]["token_logprobs"]
    assert first is None
    assert all(score < 0 for score in others)
    assert streamed.rstrip().endswith("data: [DONE]")
    assert json.loads(streamed.split("data: ")[-2])["usage"]["completion_tokens"] <= 20
    assert json.loads(tokens)["tokens"]


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, marks=pytest.mark.rotate if "import litellm" in code else pytest.mark.job)
        for code in PYTHON
    ],
    ids=range(len(PYTHON)),
)
def test_python(served: Server, code: str) -> None:
    clients = Path(sys.prefix) / "clients"
    if "import litellm" in code and not clients.is_dir():
        pytest.skip(f"no litellm: make {clients.relative_to(Path.cwd())}")
    more = {"PYTHONPATH": str(clients)} if "import litellm" in code else {}
    assert run([sys.executable, "-c"], code, served, **more).strip()


def test_settings_of_programs_can_be_read() -> None:
    (settings,) = (yaml.safe_load(text) for kind, text in BLOCKS if kind == "yaml")
    assert settings["models"][0]["apiBase"] == "http://localhost:8000/v1"


def test_every_route_field_and_flag_is_told(served: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with urllib.request.urlopen(f"{served.url}/openapi.json") as answer:
        routes = json.load(answer)["paths"]
    for route in routes:
        assert f"{route.replace('{name}', 'NAME')}`" in GUIDE, route
    for request in (CompletionRequest, ConversationRequest):
        for name in {*request.model_fields, *request.refused}:
            assert f"`{name}`" in GUIDE or f"`{name}: " in GUIDE or f" {name} " in GUIDE, name
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    flags = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    assert {
        f"--{name.replace('_', '-')}" for name in ServerOptions.__dataclass_fields__ if name != "model"
    } <= flags
    for text in re.findall(r"laneformer serve [^\n|]*", GUIDE):
        assert set(re.findall(r"--[a-z][a-z-]+", text)) <= flags, text
