"""Tests of the `openai` packages on a real server: Python's, strict, and its last major; Node's."""

import json
import shutil
from pathlib import Path

import pytest

from tests.laneformer.serve.clients import openai_checks
from tests.laneformer.serve.clients.conftest import NODE_CLIENTS, output
from tests.laneformer.serve.clients.openai_checks import CHECKS

FOLDER = Path(__file__).parent


@pytest.mark.job
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_openai(endpoint, check):
    check(endpoint)


@pytest.mark.rotate
def test_the_previous_major(endpoint, other_python):
    printed = other_python(openai_checks.__file__, endpoint.url, endpoint.model, endpoint.key)
    assert printed.split()[-1].startswith("2.")


@pytest.mark.rotate
def test_node(endpoint):
    if shutil.which("node") is None or not NODE_CLIENTS.is_dir():
        pytest.skip(f"no Node.js, or no {NODE_CLIENTS.name}: make .venv/{NODE_CLIENTS.name}")
    program = NODE_CLIENTS / "openai_session.mjs"  # where node finds the package
    shutil.copy(FOLDER / "openai_session.mjs", program)
    report = json.loads(
        output(["node", str(program), endpoint.url, endpoint.model, endpoint.key], timeout_s=60)
    )
    content = endpoint.content()
    assert report["models"] == ["tiny"]
    assert report["content"] == report["streamed"] == report["helper"] == content
    assert report["usage"]["completion_tokens"] <= 24
    assert report["refused"] == {"status": 400, "param": "temprature"}
    assert report["unauthorised"] == 401
    assert report["aborted"] == 3
    assert report["after"] == content
