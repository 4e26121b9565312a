"""The fluid model by hand where a hand can, and against a projection made before it."""

from __future__ import annotations

import pytest

from tools.bench.cuda_model import modelled
from tools.fluid import Memory, Step, shared_out, token_us

MEMORY = Memory(rate=100, port=1000, ring=500)
FIRST_KERNEL = {"issue_share": 0.7, "attention_us": 9, "round_us": 2.2, "stream_us": 1.8, "activation_us": 1.5,
                "tail_us": 7}  # fmt: skip


@pytest.mark.parametrize(("stall_us", "idle_us"), [(2.0, 0.0), (5.0, 0.0), (9.0, 4.0)])
def test_one_step_by_hand(stall_us: float, idle_us: float) -> None:
    """Rings of 500 bytes at 100 bytes/us hide 5 us of a stall, whatever its length; the rest is idle memory."""
    step = Step(bytes=3000, rate=200, stall_us=stall_us, behind=0)
    assert token_us([step], 1, MEMORY, 0.0) == pytest.approx(30 + idle_us, abs=1e-3)


def test_a_slow_block_is_bound_by_its_arithmetic() -> None:
    assert token_us([Step(3000, 50, 2, 0)], 1, MEMORY, 0.0) == pytest.approx(62, abs=1e-3)


def test_rings_hide_two_stalls_only_as_far_as_they_are_empty_again() -> None:
    """250 bytes at 200 - 100 bytes/us empty 125 bytes of the rings: of the second stall that
    is what they hide.
    """
    steps = [Step(3000, 200, 5, None), Step(250, 200, 5, 0)]
    assert token_us(steps, 1, MEMORY, 0.0) == pytest.approx(32.5 + (5 - 1.25), abs=1e-3)


def test_lanes_in_step_leave_the_memory_idle_together() -> None:
    """Two lanes of half the rate each; a stall of both costs what one lane's alone would."""
    memory = Memory(rate=200, port=1000, ring=500)
    assert token_us([Step(3000, 300, 9, 0)], 2, memory, 0.0) == pytest.approx(30 + 4, abs=1e-3)


@pytest.mark.parametrize("demands", [[1.0, 9.0, 9.0], [0.0, 0.0, 2.0], [9.0, 1.0, 3.0], [5.0, 5.0, 5.0]])
def test_what_one_lane_does_not_want_the_others_get(demands: list[float]) -> None:
    given = shared_out(demands, 10.0)
    assert sum(given) == pytest.approx(min(10.0, sum(demands)))
    assert all(g <= d for g, d in zip(given, demands, strict=True))
    wanting = [g for g, d in zip(given, demands, strict=True) if g < d]
    assert wanting == pytest.approx([max(given)] * len(wanting))


@pytest.mark.parametrize(
    ("stalls", "share", "tokens_per_s"),
    [(FIRST_KERNEL, 0.92, 948), (FIRST_KERNEL, 0.85, 882), ({}, 0.92, 991)],
)
def test_the_earlier_projection(stalls: dict[str, float], share: float, tokens_per_s: float) -> None:
    """Of `2b` on an H200 by another model, with the stalls of an idle memory: 1.5% are the difference between two
    ways to let lanes drift.
    """
    found = modelled("central", replaced={"saturated_latency": 1.0, "memory_share": share, **stalls})
    assert found["tokens_per_s"] == pytest.approx(tokens_per_s, rel=0.015)
