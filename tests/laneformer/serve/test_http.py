"""Tests common to all paths: HEAD beside GET, lone surrogates in texts, and IPv6 addresses."""

import json
import socket

import pytest

from laneformer.serve.options import ServerOptions
from tests.laneformer.serve.conftest import in_process
from tests.laneformer.serve.endpoint import parse_table

PATHS = """
/ /health /props /metrics /openapi.json /playground/app.js /v1/models /v1/models/tiny /v1/models/other
/api/tags /api/ps /api/version /nowhere /v1/completions
"""


@pytest.mark.parametrize("path", PATHS.split())
def test_head_answers_as_get(tiny, path):
    right = tiny.get(path)
    head = tiny.head(path)
    assert head.status_code == right.status_code
    assert head.content == b""
    if path == "/metrics":  # which counts these requests
        head.headers["content-length"] = right.headers["content-length"]
    assert head.headers == right.headers


def test_head_needs_the_key_as_get_does(model_folder):
    with in_process(model_folder, api_key="k") as client:
        assert [client.head(path).status_code for path in ("/", "/v1/models")] == [200, 401]


JSON = {"content-type": "application/json"}
# path | body | field that the error names, where the API's errors name one
BODIES = r"""
/tokenize | {"content": HALF} | content
/v1/completions | {"prompt": ["x", HALF]} | prompt[1]
/v1/chat/completions | {"messages": [{"content": [{"text": HALF}]}]} | messages[0].content[0].text
/v1/chat/completions | {"messages": [], "metadata": {HALF: 1}} | metadata
/v1/chat/completions | {HALF: 1} | null
/v1/messages | {"messages": [{"content": HALF}]} | null
/api/generate | {"prompt": HALF, "options": {"stop": [HALF]}} | null
""".replace("HALF", r'"x\ud83d"')


@pytest.mark.parametrize(("path", "body", "param"), parse_table(BODIES))
def test_half_a_surrogate_pair_is_refused_by_name(tiny, path, body, param):
    answer = tiny.post(path, content=json.dumps(body), headers=JSON)
    assert answer.status_code == 400, answer.text
    assert "half a surrogate pair" in answer.text
    assert param is None or answer.json()["error"]["param"] == param


def test_whole_pairs_and_echoed_names_are_answered(tiny):
    pair = rb'{"content": "\ud83d\ude00 \\ud83d"}'
    assert tiny.post("/tokenize", content=pair, headers=JSON).status_code == 200
    assert tiny.get("/v1/models/%ED%A0%BD").status_code == 404
    assert tiny.get("/health", headers={b"host": b"\xed\xa0\xbd"}).status_code == 403


@pytest.mark.parametrize(
    ("flag", "host"), [("[::1]", "::1"), ("::1", "::1"), ("::", "::"), ("[::]", "::")]
)
def test_addresses_of_ipv6(flag, host):
    options = ServerOptions(host=flag, port=0)
    assert options.host == host
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with options.listen() as listening:
        port = listening.getsockname()[1]
        # "::" takes connections of IPv4, too
        for address in ("::1", *(["127.0.0.1"] if host == "::" else [])):
            socket.create_connection((address, port), timeout=5).close()


def test_tokens_of_the_template_may_be_given(tiny):
    # as in Transformers, they replace the tokenizer's
    messages = [{"role": "user", "content": "x"}]
    for name in ("bos_token", "eos_token", "self", "documents"):
        body = {"messages": messages, "max_tokens": 1, "chat_template_kwargs": {name: "x"}}
        assert tiny.post("/v1/chat/completions", json=body).status_code == 200, name
