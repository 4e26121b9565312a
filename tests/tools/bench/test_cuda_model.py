"""The model of the CUDA engine's speed: by hand where a hand can, the projection it was made for, labels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench import cuda_model
from tools.bench.cuda_model import Memory, Step, modelled, shared_out, token_us, values_of

# tokens/s of `2b` on an H200 as an earlier model had them, of which the inputs alone are kept: 1.5% are the
# difference between two ways to let lanes drift
EARLIER = {
    ("first", "central", 0.92): 948, ("first", "central", 0.85): 882, ("first", "pessimistic", 0.92): 887,
    ("first", "pessimistic", 0.85): 838, ("today", "central", 0.92): 991, ("today", "central", 0.85): 918,
}  # fmt: skip


@pytest.mark.parametrize(("stall_us", "idle_us"), [(2.0, 0.0), (5.0, 0.0), (9.0, 4.0)])
def test_one_step_by_hand(stall_us: float, idle_us: float) -> None:
    """Rings of 500 bytes at 100 bytes/us hide 5 us of a stall, whatever its length; the rest is idle memory."""
    memory = Memory(rate=100, port=1000, ring=500)
    step = Step(bytes=3000, rate=200, stall_us=stall_us, behind=0)
    assert token_us([step], 1, memory, 0.0) == pytest.approx(30 + idle_us, abs=1e-3)


def test_a_slow_block_is_bound_by_its_arithmetic() -> None:
    memory = Memory(rate=100, port=1000, ring=500)
    assert token_us([Step(3000, 50, 2, 0)], 1, memory, 0.0) == pytest.approx(62, abs=1e-3)


def test_rings_hide_two_stalls_only_as_far_as_they_are_empty_again() -> None:
    """250 bytes at 200 - 100 bytes/us empty 125 bytes of the rings: of the second stall that
    is what they hide.
    """
    memory = Memory(rate=100, port=1000, ring=500)
    steps = [Step(3000, 200, 5, None), Step(250, 200, 5, 0)]
    assert token_us(steps, 1, memory, 0.0) == pytest.approx(32.5 + (5 - 1.25), abs=1e-3)


@pytest.mark.parametrize("demands", [[1.0, 9.0, 9.0], [0.0, 0.0, 2.0], [9.0, 1.0, 3.0], [5.0, 5.0, 5.0]])
def test_what_one_lane_does_not_want_the_others_get(demands: list[float]) -> None:
    given = shared_out(demands, 10.0)
    assert sum(given) == pytest.approx(min(10.0, sum(demands)))
    assert all(g <= d for g, d in zip(given, demands, strict=True))
    wanting = [g for g, d in zip(given, demands, strict=True) if g < d]
    assert wanting == pytest.approx([max(given)] * len(wanting))


def test_lanes_in_step_leave_the_memory_idle_together() -> None:
    """Two lanes of half the rate each; a stall of both costs what one lane's alone would."""
    memory = Memory(rate=200, port=1000, ring=500)
    step = Step(3000, 300, 9, 0)
    assert token_us([step], 2, memory, 0.0) == pytest.approx(30 + 4, abs=1e-3)


@pytest.mark.parametrize("name", EARLIER, ids=str)
def test_the_earlier_projection(name: tuple[str, str, float]) -> None:
    kernel, case, share = name
    assert modelled(kernel, case, memory_share=share)["tokens_per_s"] == pytest.approx(
        EARLIER[name], rel=0.015
    )


def test_longer_stalls_and_a_deeper_context_cost_tokens() -> None:
    base = modelled("first", "central")
    for change in ({"attention_us": 12.0}, {"filters": True}, {"depth": 4096}, {"wide": True}):
        assert modelled("first", "central", **change)["tokens_per_s"] < base["tokens_per_s"], change
    assert base["percent_of_datasheet"] == pytest.approx(0.92 * base["percent_of_probe"], abs=1e-5)


def test_every_input_says_where_it_comes_from() -> None:
    for rows in cuda_model.tables().values():
        for name, row in rows.items():
            assert row["kind"] in ("counted", "datasheet", "assumed"), name
            assert row["source"], name
            assert row["measured"] is False, f"{name}: a measurement needs its kind and its page here"
    assert values_of("first", "central").keys() == values_of("today", "pessimistic").keys()


def test_the_page_says_that_it_is_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stub(kernel: str, case: str, *arguments: str, **options: object) -> dict[str, float]:
        return {
            "tokens_per_s": 900.0,
            "percent_of_probe": 90.0,
            "percent_of_datasheet": 80.0,
            "exposed_us_per_layer": 2.0,
        }

    monkeypatch.setattr(cuda_model, "modelled", stub)
    cuda_model.main(["--json", "--out", str(tmp_path / "page.md")])
    result = json.loads(capsys.readouterr().out)
    assert result["model"] is True
    page = (tmp_path / "page.md").read_text()
    assert "Nothing here was measured" in page
    assert "not a measurement" in page
    assert page.count("tokens/s, modelled") == len(result["tables"]) == 4
    assert "| B200 | 300m | today | pessimistic | 900 | 80 | 2 |" in page
    assert "| all.issue_bytes_per_clock | counted |" in page
