"""A real server process: who may call it, errors in OpenAI's form, clients that go away, its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.laneformer.serve.conftest import Server, start

KEY = {"authorization": "Bearer sesame"}


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The one key of an error, with OpenAI's four fields."""
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def test_health_and_models(tiny: Server) -> None:
    assert httpx.get(f"{tiny.url}/health").json() == {"status": "ok"}
    (model,) = httpx.get(f"{tiny.url}/v1/models").json()["data"]
    assert model["id"] == "tiny"
    assert httpx.get(f"{tiny.url}/v1/models/tiny").json() == model
    missing = httpx.get(f"{tiny.url}/v1/models/org/other")
    assert missing.status_code == 404
    assert error_of(missing)["code"] == "model_not_found"


def test_tokenize_takes_text_for_text(tiny: Server) -> None:
    text = "The quick <|im_end|>"
    found = httpx.post(f"{tiny.url}/tokenize", json={"content": text}).json()
    assert found["count"] == len(found["tokens"]) > 5  # the control token in pieces
    back = httpx.post(f"{tiny.url}/detokenize", json={"tokens": found["tokens"]}).json()
    assert back == {"content": text}
    begun = httpx.post(f"{tiny.url}/tokenize", json={"content": text, "add_special": True}).json()
    assert begun["tokens"][1:] == found["tokens"]
    for ids in ([-1], [10**30], ["a"], "abc", [0.5]):
        response = httpx.post(f"{tiny.url}/detokenize", json={"tokens": ids})
        assert response.status_code == 400
        assert error_of(response)["param"].startswith("tokens")


def test_what_the_engine_is_and_what_bounds_it(tiny: Server) -> None:
    facts = httpx.get(f"{tiny.url}/props").json()
    assert facts["context_tokens"] == 512
    assert facts["draft_model"] is None
    assert facts["limit_tokens_per_s"] == facts["probe_bytes_per_s"] / facts["weight_bytes"] > 0


@pytest.mark.job
def test_memory_is_measured_again_between_requests_and_the_best_is_kept(server, model_folder: Path) -> None:
    prelude = """
import laneformer.serve.app, laneformer.serve.scheduler
laneformer.serve.scheduler.IDLE_S, found = 0.05, iter([1e9, 3e9, 2e9])
laneformer.serve.app.probe = lambda engine: next(found)
"""
    one = server(model_folder, prelude)

    def read() -> float:
        return httpx.get(f"{one.url}/props").json()["probe_bytes_per_s"]

    until = time.monotonic() + 20
    while read() != 3e9 and time.monotonic() < until:
        time.sleep(0.02)
    assert httpx.post(f"{one.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
    time.sleep(0.2)
    assert httpx.get(f"{one.url}/health").status_code == 200, "a third look, and it was asked once a stretch"
    assert read() == 3e9


@pytest.mark.parametrize(
    ("method", "path", "body", "kind", "status", "match"),
    [
        ("GET", "/nothing", b"", None, 404, "Not Found"),
        ("POST", "/v1/nothing", b"{}", None, 404, "Not Found"),
        ("GET", "/v1/completions", b"", None, 405, "Method Not Allowed"),
        ("OPTIONS", "/v1/completions", b"", None, 405, "Method Not Allowed"),
        ("POST", "/v1/completions", b"{", "application/json", 400, "not a JSON object"),
        ("POST", "/v1/completions", b"", "application/json", 400, "not a JSON object"),
        ("POST", "/v1/completions", b"[]", "application/json", 400, "not a JSON object"),
        ("POST", "/v1/completions", b'"text"', "application/json", 400, "not a JSON object"),
        ("POST", "/v1/completions", b"\xff\xfe", "application/json", 400, "body"),
        ("POST", "/v1/completions", b"[" * 100_000, "application/json", 400, "body"),
        ("POST", "/v1/completions", b'{"prompt": "a"}', "text/plain", 400, "send application/json"),
        ("POST", "/v1/completions", b'{"promt": "a"}', "application/json", 400, "did you mean 'prompt'"),
        ("POST", "/v1/completions", b'{"prompt": "a", "n": 0}', "application/json", 400, "n = 0"),
        (
            "POST",
            "/v1/completions",
            b'{"prompt": "a", "temperature": NaN}',
            "application/json",
            400,
            "temperature",
        ),
        ("POST", "/v1/completions", b'{"prompt": [1, 2, 999]}', "application/json", 400, "999"),
        ("POST", "/v1/chat/completions", b"{}", "application/json", 400, "messages is missing"),
    ],
)
def test_errors_have_openais_form(
    tiny: Server, method: str, path: str, body: bytes, kind: str | None, status: int, match: str
) -> None:
    headers = {"content-type": kind} if kind else {}
    response = httpx.request(method, tiny.url + path, content=body, headers=headers)
    assert response.status_code == status
    error = error_of(response)
    assert match in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("length", ["declared", "chunked"])
def test_a_body_may_be_so_long(tiny: Server, length: str) -> None:
    body = b"x" * (4 * 2**20 + 1)
    parts = (body[i : i + 2**16] for i in range(0, len(body), 2**16))
    headers = {"content-type": "application/json"}
    response = httpx.post(
        f"{tiny.url}/v1/completions", content=body if length == "declared" else parts, headers=headers
    )
    assert response.status_code == 413
    assert "more than 4194304 bytes" in error_of(response)["message"]


def test_a_body_may_have_so_many_values(tiny: Server) -> None:
    response = httpx.post(f"{tiny.url}/v1/completions", json={"prompt": [7] * 200_000})
    assert response.status_code == 400
    assert "fit this model's context" in error_of(response)["message"]


@pytest.fixture(scope="module")
def named(model_folder: Path) -> Iterator[Server]:
    server = start(model_folder, host_names=["Playground.example"], api_key="sesame")
    yield server
    assert server.stop() == 0


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example:8000"}, 403),
        ({"host": "[::1"}, 403),
        ({"host": "localhost.evil.example"}, 403),
        ({"host": "localhost:1234"}, 200),
        ({"host": "[::1]:80"}, 200),
        ({"host": "playground.example"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://localhost:3000"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "OWN"}, 200),
    ],
)
def test_pages_of_other_sites_cannot_use_it(named: Server, headers: dict[str, str], status: int) -> None:
    headers = {name: named.url if value == "OWN" else value for name, value in headers.items()} | KEY
    response = httpx.get(f"{named.url}/v1/models", headers=headers)
    assert response.status_code == status
    if status == 403:
        assert error_of(response)["type"] == "permission_error"
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.job
def test_pages_that_are_allowed_can_use_it(server, model_folder: Path) -> None:
    one = server(model_folder, allowed_origins=["https://notes.example"], api_key="key")
    page = {"origin": "https://notes.example", "authorization": "Bearer key"}
    asks = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    leave = httpx.options(f"{one.url}/v1/completions", headers={"origin": page["origin"], **asks})
    assert leave.status_code == 200, leave.text
    for answer in (leave, httpx.get(f"{one.url}/v1/models", headers=page)):
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, page["origin"])
    assert (
        httpx.get(f"{one.url}/v1/models", headers=page | {"origin": "https://evil.example"}).status_code
        == 403
    )
    assert httpx.get(f"{one.url}/v1/models", headers={"origin": page["origin"]}).status_code == 401


def test_the_key(named: Server) -> None:
    for headers in (
        {},
        {"authorization": "Bearer Sesame"},
        {"authorization": "sesame"},
        {"authorization": "Bearer é"},
    ):
        for method, path in (
            ("GET", "/v1/models"),
            ("POST", "/v1/completions"),
            ("GET", "/metrics"),
            ("GET", "/x"),
        ):
            response = httpx.request(
                method, named.url + path, headers=[(k, v.encode()) for k, v in headers.items()]
            )
            assert response.status_code == 401
            assert error_of(response)["code"] == "invalid_api_key"
    assert httpx.get(f"{named.url}/health").status_code == 200
    for headers in (KEY, {"x-api-key": "sesame"}, {"x-api-key": "made up", **KEY}):
        assert httpx.get(f"{named.url}/v1/models", headers=headers).status_code == 200
    assert httpx.get(f"{named.url}/v1/models", headers={"x-api-key": "wrong"}).status_code == 401
