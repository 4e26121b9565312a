"""tools.soak: some seconds of it before a tiny server, and what its verdict sees."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.laneformer.serve.conftest import write_model
from tests.shared import Shared
from tools.soak import Soak, hostile, verdict

TIMES = ["health", "gaps"]  # which a machine that runs other tests does not keep
QUIET = {"health_p99_ms": 3.0, "gap_p99_ms": 4.0, "answers": 9, "errors": 0}
HELD = {"files": 20, "bytes": 10**9, "cache_bytes": 2**20}
CALM: dict[str, Any] = {
    "idle": {**QUIET}, "soak": {**QUIET}, "statuses": {"400": 30, "cut": 9}, "before": {**HELD}, "after": {**HELD},
}  # fmt: skip


@pytest.mark.rotate
def test_some_seconds(shared: Shared) -> None:
    model = shared("soaked", lambda folder: write_model(folder, max_position_embeddings=512))
    found = Soak(model=model, minutes=0.1, clients=3).run()
    assert [name for name in found["failed"] if name not in TIMES] == [], found
    assert found["soak"]["healths"] > 20
    assert {"400", "cut", "dripped"} <= found["statuses"].keys()


@pytest.mark.parametrize(
    ("place", "name", "value", "failed"),
    [
        ("statuses", "400", 3, []),
        ("soak", "health_p99_ms", 49.0, []),
        ("statuses", "500", 1, ["no 5xx"]),
        ("soak", "errors", 1, ["honest answers"]),
        ("soak", "health_p99_ms", 51.0, ["health"]),
        ("soak", "gap_p99_ms", 8.1, ["gaps"]),
        ("after", "files", 23, ["files"]),
        ("after", "bytes", 2 * 10**9, ["memory"]),
    ],
)
def test_the_verdict(place: str, name: str, value: float, failed: list[str]) -> None:
    found = copy.deepcopy(CALM)
    found[place][name] = value
    assert verdict(found)["failed"] == failed


@pytest.mark.rotate
def test_hostile_bodies_are_within_the_limit() -> None:
    sizes = [len(body) for _, body in hostile()]
    assert max(sizes) > 4 * 2**20 - 2**12
    assert max(sizes) <= 4 * 2**20
