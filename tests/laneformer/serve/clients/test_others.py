"""litellm, curl, and schemathesis against a real server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.laneformer.serve.clients.conftest import output
from tests.laneformer.serve.clients.openai_checks import QUESTION, Asked

LITELLM = """
import asyncio, json, sys
import litellm
url, model, key = sys.argv[1:]
messages = [{"role": "user", "content": "def main(argv):"}]
where = dict(api_base=f"{url}/v1", api_key=key, temperature=0)
given = dict(model=f"openai/{model}", messages=messages, max_tokens=24, **where)
whole = litellm.completion(**given)
parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**given, stream=True)]
later = asyncio.run(litellm.acompletion(**given))
texts = litellm.text_completion(
    model=f"text-completion-openai/{model}", prompt="import os", max_tokens=8, **where
)
try:
    litellm.completion(**{**given, "api_key": "wrong"})
except litellm.AuthenticationError:
    refused = True
print(json.dumps([whole.choices[0].message.content, "".join(parts), later.choices[0].message.content,
                  whole.usage.completion_tokens, texts.choices[0].text, refused]))
"""

NARROWED: dict[str, Any] = {
    "model": {"const": "tiny"},
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": 20},
}


def content(asked: Asked) -> str:
    with asked.sync() as client:
        return str(asked.chat(client).choices[0].message.content)


@pytest.mark.rotate
def test_litellm(asked: Asked, other_python: Callable[..., str]) -> None:
    printed = other_python("-c", LITELLM, asked.url, asked.model, asked.key).splitlines()[-1]
    whole, streamed, later, tokens, text, refused = json.loads(printed)
    assert whole == streamed == later == content(asked)
    assert 0 < tokens <= 24
    with asked.sync() as client:
        given: dict[str, Any] = {"prompt": "import os", "max_tokens": 8, "temperature": 0}
        assert text == client.completions.create(model=asked.model, **given).choices[0].text
    assert refused


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl(asked: Asked, tmp_path: Path) -> None:
    def curl(path: str, *flags: str, **body: Any) -> tuple[int, str, str]:
        """Status, type and body."""
        data = ["-H", "Content-Type: application/json", "-d", json.dumps(body)] if body else []
        form = ["-o", str(tmp_path / "body"), "-w", "%{http_code} %{content_type}"]
        printed = output(["curl", "-sSN", *flags, *data, *form, asked.url + path], timeout_s=30)
        status, _, kind = printed.partition(" ")
        return int(status), kind, (tmp_path / "body").read_text()

    key = ("-H", f"Authorization: Bearer {asked.key}")
    chat = {"model": asked.model, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    status, kind, body = curl("/v1/chat/completions", *key, **chat)
    assert (status, kind.split(";")[0]) == (200, "application/json")
    message = json.loads(body)["choices"][0]
    assert message["message"]["content"] == content(asked)
    assert message["message"]["refusal"] is message["logprobs"] is None, "null fields are there"

    status, kind, body = curl("/v1/chat/completions", *key, **chat, stream=True)
    assert (status, kind.split(";")[0]) == (200, "text/event-stream")
    *events, done, end = body.replace("\r\n", "\n").split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if not event.startswith(":")]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == content(asked)
    assert {"logprobs", "finish_reason", "delta", "index"} <= set(chunks[1]["choices"][0])

    assert curl("/v1/chat/completions", **chat)[0] == 401
    assert curl("/v1/chat/completions", *key, "-X", "GET")[0] == 405
    status, _, body = curl(
        "/v1/chat/completions", *key, "-d", "{not json", "-H", "Content-Type: application/json"
    )
    assert status == 400
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    status, _, body = curl("/nowhere", *key)
    assert status == 404
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert curl("/health")[0] == 200, "a load balancer has no key"


@pytest.mark.rotate
def test_no_body_makes_a_5xx(asked: Asked, other_python: Callable[..., str], tmp_path: Path) -> None:
    """Schemathesis draws bodies, headers and methods from the application's own OpenAPI, right
    ones and wrong ones.
    """
    described = httpx.get(
        f"{asked.url}/openapi.json", headers={"Authorization": f"Bearer {asked.key}"}
    ).json()
    for schema in described["components"][
        "schemas"
    ].values():  # drawn names and lengths would nearly all be refused
        for name, narrow in NARROWED.items():
            if name in schema.get("properties", {}):
                schema["properties"][name] = narrow
    (tmp_path / "openapi.json").write_text(json.dumps(described))
    (tmp_path / "schemathesis.toml").write_text("")
    other_python(
        "-m", "schemathesis.cli", "--config-file", str(tmp_path / "schemathesis.toml"), "run",
        str(tmp_path / "openapi.json"), "--url", asked.url, "--header", f"Authorization: Bearer {asked.key}",
        "--checks", "not_a_server_error", "--seed", "1", "--phases", "coverage,fuzzing", "--max-time", "45",
        "--request-timeout", "20", cwd=tmp_path,
    )  # fmt: skip
    assert asked.becomes_idle()
    assert content(asked), "it still answers"
