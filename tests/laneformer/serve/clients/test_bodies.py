"""What twelve programs send by default is answered."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.laneformer.serve.clients.bodies import BODIES
from tests.laneformer.serve.clients.openai_checks import Asked


@pytest.mark.parametrize(
    ("client", "body"), [(client, body) for client, bodies in BODIES.items() for body in bodies]
)
def test_answered(asked: Asked, client: str, body: dict[str, Any]) -> None:
    key = {"authorization": f"Bearer {asked.key}"}
    answer = httpx.post(f"{asked.url}/v1/chat/completions", json=body, headers=key, timeout=300)
    assert answer.status_code == 200, (client, answer.text)
    if not body.get("stream"):
        assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")
        return
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if not event.startswith(":")]
    assert "error" not in chunks[-1]
    assert any(choice["finish_reason"] for chunk in chunks for choice in chunk["choices"])


def test_there_are_twelve() -> None:
    assert len(BODIES) == 12
