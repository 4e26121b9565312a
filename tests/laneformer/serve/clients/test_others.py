"""Tests of litellm and schemathesis against a real server."""

import json

import httpx
import pytest

pytestmark = pytest.mark.rotate
LITELLM = """
import asyncio, json, sys
import litellm
url, model, key = sys.argv[1:]
messages = [{"role": "user", "content": "def main(argv):"}]
where = dict(api_base=f"{url}/v1", api_key=key, temperature=0)
options = dict(model=f"openai/{model}", messages=messages, max_tokens=24, **where)
whole = litellm.completion(**options)
parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**options, stream=True)]
later = asyncio.run(litellm.acompletion(**options))
texts = litellm.text_completion(
    model=f"text-completion-openai/{model}", prompt="import os", max_tokens=8, **where
)
try:
    litellm.completion(**{**options, "api_key": "wrong"})
except litellm.AuthenticationError:
    refused = True
print(json.dumps([whole.choices[0].message.content, "".join(parts), later.choices[0].message.content,
                  whole.usage.completion_tokens, texts.choices[0].text, refused]))
"""
FLAGS = """--checks not_a_server_error --seed 1 --phases coverage,fuzzing --max-time 45
--request-timeout 20"""
# drawn names and lengths would nearly all be refused
NARROWED = {
    "model": {"const": "tiny"},
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": 20},
}


def test_litellm(endpoint, other_python):
    printed = other_python("-c", LITELLM, endpoint.url, endpoint.model, endpoint.key).splitlines()[
        -1
    ]
    whole, streamed, later, tokens, text, refused = json.loads(printed)
    assert whole == streamed == later == endpoint.content()
    assert 0 < tokens <= 24
    with endpoint.sync() as client:
        options = {"prompt": "import os", "max_tokens": 8, "temperature": 0}
        assert text == client.completions.create(model=endpoint.model, **options).choices[0].text
    assert refused


def test_no_body_makes_a_5xx(endpoint, other_python, tmp_path):
    # drawn from the application's OpenAPI schema: bodies, headers and methods, right and wrong
    key = f"Authorization: Bearer {endpoint.key}"
    description = httpx.get(f"{endpoint.url}/openapi.json", headers=dict([key.split(": ")])).json()
    for schema in description["components"]["schemas"].values():
        properties = schema.get("properties", {})
        properties |= {name: narrow for name, narrow in NARROWED.items() if name in properties}
    (tmp_path / "openapi.json").write_text(json.dumps(description))
    (tmp_path / "schemathesis.toml").write_text("")
    files = ["--config-file", f"{tmp_path}/schemathesis.toml", "run", f"{tmp_path}/openapi.json"]
    server = ["--url", endpoint.url, "--header", key]
    other_python("-m", "schemathesis.cli", *files, *server, *FLAGS.split(), cwd=tmp_path)
    assert endpoint.becomes_idle()
    assert endpoint.content(), "it still answers"
