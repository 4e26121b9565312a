"""Tests of the default bodies of twelve programs (program_bodies.json, after their sources)."""

import json
from pathlib import Path

import pytest

from tests.laneformer.serve.conftest import in_process
from tests.laneformer.serve.endpoint import data_of

BODIES = json.loads(Path(__file__).with_name("program_bodies.json").read_text())


@pytest.fixture(scope="module")
def client(model_folder):
    with in_process(model_folder, engine={"context_tokens": 1024}) as client:  # room for tools
        yield client


@pytest.mark.parametrize("program", BODIES)
def test_answered(client, program):
    for body in BODIES[program]:
        answer = client.post("/v1/chat/completions", json={"model": "tiny", **body})
        assert answer.status_code == 200, answer.text
        events = data_of(answer.text)[:-1] if body.get("stream") else [answer.text]
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        assert {"stop", "length", "tool_calls"} & {choice["finish_reason"] for choice in choices}
