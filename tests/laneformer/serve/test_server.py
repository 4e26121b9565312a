"""A real server process: who may call it, its errors, its end."""

from __future__ import annotations

import httpx

from tests.laneformer.serve.conftest import Server


def test_health_and_models(tiny: Server) -> None:
    assert httpx.get(f"{tiny.url}/health").json() == {"status": "ok"}
    (model,) = httpx.get(f"{tiny.url}/v1/models").json()["data"]
    assert model["id"] == "tiny"
    assert httpx.get(f"{tiny.url}/v1/models/tiny").json() == model
