"""Tests of access to the server, errors in OpenAI's form, and what the server reports of itself."""

import pytest

from tests.laneformer.serve.conftest import in_process
from tests.laneformer.serve.endpoint import error_of, on_a_loop, parse_table

KEY = {"authorization": "Bearer sesame"}
MAX_BODY_BYTES = 4 * 2**20


def test_models(tiny):
    (model,) = tiny.get("/v1/models").json()["data"]
    assert model["id"] == "tiny"
    assert tiny.get("/v1/models/tiny").json() == model
    assert error_of(tiny.get("/v1/models/org/other"))["code"] == "model_not_found"


def test_tokenize_takes_text_for_text(tiny):
    text = "The quick <|im_end|>"
    tokens = tiny.post("/tokenize", json={"content": text}).json()
    assert tokens["count"] == len(tokens["tokens"]) > 5, "the control token in pieces"
    assert tiny.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"content": text}
    special = tiny.post("/tokenize", json={"content": text, "add_special": True}).json()
    assert special["tokens"][1:] == tokens["tokens"]


@pytest.mark.parametrize("ids", [[-1], [10**30], ["a"], "abc", [0.5]])
def test_ids_that_are_none_are_refused(tiny, ids):
    response = tiny.post("/detokenize", json={"tokens": ids})
    assert response.status_code == 400
    assert error_of(response)["param"].startswith("tokens")


def test_memory_is_measured_again_while_idle_and_the_best_stays(model_folder, monkeypatch):
    # bytes/s: the third is no better than the second
    measured = iter([1e9, 3e9, 2e9])
    monkeypatch.setattr("laneformer.serve.app.probe", lambda engine: next(measured))
    with in_process(model_folder) as client:
        facts = client.get("/props").json()
        assert facts["probe_bytes_per_s"] == 1e9
        assert facts["context_tokens"] == 512
        assert facts["limit_tokens_per_s"] == 1e9 / facts["weight_bytes"]
        for _ in range(2):
            client.app.state.scheduler.when_idle[0]()
            assert client.get("/props").json()["probe_bytes_per_s"] == 3e9
    assert next(measured, None) is None


NO_JSON = "not a JSON object"
WRONG = [  # of /v1/completions
    (b"{", NO_JSON),
    (b"", NO_JSON),
    (b"[]", NO_JSON),
    (b"[" * 100_000, NO_JSON),
    (b'"text"', NO_JSON),
    (b"\xff\xfe", "body"),
    (b'{"prompt": [%s7]}' % (b"7," * 200_000), "fit this model's context"),
]


@pytest.mark.parametrize(("body", "message"), WRONG, ids=range(len(WRONG)))
def test_errors_have_openais_form(tiny, body, message):
    response = tiny.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    error = error_of(response)
    assert response.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]


ABSENT = """
GET | /nothing | 404 | Not Found
GET | /v1/completions | 405 | Method Not Allowed
POST | /v1/completions | 400 | send application/json
"""


@pytest.mark.parametrize(("method", "path", "status", "message"), parse_table(ABSENT))
def test_what_is_not_there(tiny, method, path, status, message):
    response = tiny.request(method, path, headers={"content-type": "text/plain"})
    assert response.status_code == status
    assert message in error_of(response)["message"]


def test_a_body_may_be_so_long(tiny):
    # in whatever parts it comes

    async def chunks():
        for _ in range(MAX_BODY_BYTES // 2**16 + 1):
            yield b"x" * 2**16

    response = on_a_loop(tiny.app, lambda client: client.post("/v1/completions", content=chunks()))
    assert response.status_code == 413
    assert f"more than {MAX_BODY_BYTES} bytes" in error_of(response)["message"]


@pytest.fixture(scope="module")
def key_client(model_folder):
    options = {"host_names": ["Playground.example"], "allowed_origins": ["https://notes.example"]}
    with in_process(model_folder, api_key="sesame", **options) as client:
        yield client


HEADERS = """
host | evil.example:8000 | 403
host | [::1 | 403
host | localhost.evil.example | 403
host | localhost:1234 | 200
host | [::1]:80 | 200
host | playground.example | 200
origin | http://evil.example | 403
origin | http://localhost:3000 | 403
origin | "null" | 403
origin | http://localhost | 200
"""


@pytest.mark.parametrize(("header", "value", "status"), parse_table(HEADERS))
def test_pages_of_other_sites_cannot_use_it(key_client, header, value, status):
    response = key_client.get("/v1/models", headers={header: value, **KEY})
    assert response.status_code == status
    if status == 403:
        assert error_of(response)["type"] == "permission_error"
    assert "access-control-allow-origin" not in response.headers


def test_pages_that_are_allowed_can_use_it(key_client):
    page = {"origin": "https://notes.example"}
    asks = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    # a browser asks for leave first, and sends no key with that
    leave = key_client.options("/v1/completions", headers=page | asks)
    for answer in (leave, key_client.get("/v1/models", headers=page | KEY)):
        assert answer.status_code == 200, answer.text
        assert answer.headers["access-control-allow-origin"] == page["origin"]
    assert key_client.get("/v1/models", headers=page).status_code == 401


def test_the_key(key_client):
    for wrong in ("", "Bearer Sesame", "sesame", "Bearer é"):
        for path in ("/v1/models", "/metrics", "/x"):
            response = key_client.get(path, headers={"authorization": wrong.encode()})
            assert response.status_code == 401
            assert error_of(response)["code"] == "invalid_api_key"
    assert key_client.get("/health").status_code == 200
    # Anthropic's clients use x-api-key; the right key in either header is enough
    for headers in (KEY, {"x-api-key": "sesame"}, {"x-api-key": "made up", **KEY}):
        assert key_client.get("/v1/models", headers=headers).status_code == 200
    assert key_client.get("/v1/models", headers={"x-api-key": "wrong"}).status_code == 401
