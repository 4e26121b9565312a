"""What is calculated of threads and sockets: lanes and bytes are the engine's, limits are those that were given."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from laneformer import Engine, LaneformerConfig
from laneformer.engine.bench import probe
from laneformer.engine.cpu import _core
from tools import sockets
from tools.sockets import Plan, Speeds, planned, prediction, rates, shares

SPEEDS = Speeds(core=25e9, socket=300e9, link=100e9, near_s=0.3e-6, far_s=1e-6)
FREE = replace(SPEEDS, near_s=0.0, far_s=0.0)
CONFIG = LaneformerConfig.from_flavor("2b")


@pytest.mark.parametrize(
    ("threads", "lanes"),
    [
        (2, [(0, 3), (4, 7)]),
        (3, [(0, 1), (2, 4), (5, 7)]),
        (6, [(0, 3)] * 3 + [(4, 7)] * 3),
        (8, [(i, i) for i in range(8)]),
        (12, [(first, first + 1) for first in (0, 2, 4, 6) for _ in range(3)]),
        (16, [(i // 2, i // 2) for i in range(16)]),
    ],
)
def test_lanes_are_read_off_the_engines_tapes(threads: int, lanes: list[tuple[int, int]]) -> None:
    plan = planned(CONFIG, "bf16", threads)
    assert plan.lanes == lanes
    lane_bytes = sum(plan.layer_bytes) / CONFIG.num_lanes
    assert max(plan.layer_bytes) / lane_bytes == pytest.approx(_core.largest_share(8, threads, threads))


def test_tapes_that_are_no_whole_lanes_are_an_error() -> None:
    assert list(shares([4, 4, 8], 4)) == [(1, 0, 0), (1, 1, 1), (1, 2, 3)]
    with pytest.raises(AssertionError, match=r"2 lanes of 4 bytes are not shared out: \[3, 3, 3\]"):
        list(shares([3, 3, 3], 2))


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
def test_two_threads_of_one_socket_read_what_the_probe_reads(dtype: str) -> None:
    """Where nothing waits and memory alone is the limit, a token is its bytes over the probe."""
    config = LaneformerConfig.from_flavor("tiny")
    with Engine.random(config, dtype, threads=2) as engine:
        plan, measured = planned(config, dtype, 2), probe(engine)
        assert plan.bytes == engine.weight_bytes
    found = prediction(plan, 1, "owner", replace(FREE, core=measured, socket=measured))
    assert found["tokens_per_s"] * plan.bytes == pytest.approx(measured, rel=1e-9)
    assert found["waiting_s"] == pytest.approx(0.0, abs=1e-12)
    slower = prediction(plan, 1, "owner", replace(SPEEDS, core=measured, socket=measured))
    assert slower["bytes_per_s"] < measured


def test_what_bounds_a_thread() -> None:
    plan = planned(CONFIG, "bf16", 32)
    assert rates(plan, 1, "owner", SPEEDS) == pytest.approx([300e9 / 32] * 32)
    assert rates(plan, 2, "owner", SPEEDS) == pytest.approx([300e9 / 16] * 32)
    assert rates(plan, 2, "interleaved", SPEEDS) == pytest.approx([200e9 / 16] * 32), (
        "half comes over the link"
    )
    assert rates(plan, 2, "one socket", SPEEDS) == pytest.approx([300e9 / 32] * 16 + [100e9 / 16] * 16)
    assert rates(planned(CONFIG, "bf16", 4), 2, "owner", SPEEDS) == [25e9] * 4, "a core reads no faster"


def test_the_place_of_the_weights_and_what_waits() -> None:
    plan = planned(CONFIG, "bf16", 32)
    speeds = [prediction(plan, 2, place, FREE)["tokens_per_s"] for place in sockets.PLACES]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] * plan.bytes == pytest.approx(600e9)

    def waiting(config: LaneformerConfig, threads: int, count: int) -> float:
        return 1e6 * prediction(planned(config, "bf16", threads), count, "owner", SPEEDS)["waiting_s"]

    assert waiting(CONFIG, 1, 1) == pytest.approx(0.0, abs=1e-6)
    parallel = replace(CONFIG, broadcast_delay=0)
    assert waiting(parallel, 8, 2) == pytest.approx(2 * 15 * 1.0 + 1.0), "every module, and the token"
    assert waiting(CONFIG, 8, 2) < waiting(parallel, 8, 2) / 4, "a delay hides it"
    assert waiting(CONFIG, 16, 2) == pytest.approx(waiting(CONFIG, 8, 2) + 6 * 15 * 0.3), (
        "groups meet on a socket"
    )
    across = Plan(CONFIG, [1, 1], 2 * 15, [(0, 7)] * 2)
    assert 1e6 * prediction(across, 2, "owner", SPEEDS)["waiting_s"] > 6 * 15 * 1.0, "or between two"


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    sockets.Sockets(threads=(16,), sockets=2).run()
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert [one["place"] for one in found["predictions"]] == list(sockets.PLACES)
    assert {one["lanes"] for one in found["predictions"]} == {"0-3, 4-7"}
    assert "calculated" in printed.err
    with pytest.raises(SystemExit, match="at least one socket, a thread for each"):
        sockets.Sockets(threads=(1,), sockets=2).run()
