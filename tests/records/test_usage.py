"""GPU-hours over restarts and failed starts, what is left of a phase, and its cost, against sums by hand."""

from __future__ import annotations

from typing import Any

import pytest

from records.run import read_run
from records.usage import (
    Span,
    cost,
    duration,
    gpu_hours,
    money,
    seconds_left,
    spans_of,
    usage_of,
)
from tests.records.lines import write_lines

HOUR = 3600.0


def event(kind: str, attempt: int, hours: float) -> dict[str, Any]:
    return {"kind": f"supervisor_{kind}", "attempt": attempt, "time": hours * HOUR}


def began(attempt: int, hours: float, gpus: int = 8) -> dict[str, Any]:
    return {"attempt": attempt, "time": hours * HOUR, "world_size": gpus, "step": 0}


def row(attempt: int, hours: float, step: int = 1, **more: Any) -> dict[str, Any]:
    return {"attempt": attempt, "time": hours * HOUR, "step": step, "seconds": 60.0, **more}


def spans(records: list[dict[str, Any]]) -> list[tuple[float, float, int | None]]:
    return [(s.began / HOUR, s.ended / HOUR, s.gpus) for s in spans_of(records)]


def test_an_attempt_lasts_from_its_announcement_to_its_last_record():
    first = [event("start", 1, 1.0), began(1, 1.5), row(1, 2.0), row(1, 3.0), event("end", 1, 3.25)]
    second = [
        event("give_up", 1, 3.3),
        event("start", 2, 10.0),
        began(2, 10.5, gpus=16),
        row(2, 11.0),
    ]
    assert spans([*second, *first]) == [(1.0, 3.25, 8), (10.0, 11.0, 16)]
    assert gpu_hours(spans_of([*first, *second])) == 8 * 2.25 + 16 * 1.0


def test_starts_that_fail_before_their_first_line_share_a_number_and_not_the_time_between_them():
    # no line of attempts.jsonl: the number of GPUs is unknown
    crash = {"kind": "crash", "attempt": 1, "time": 1.1 * HOUR}
    failed = [event("start", 1, 1.0), crash, event("end", 1, 1.25)]
    later = [event("start", 1, 100.0), began(1, 100.25), row(1, 101.0)]
    assert spans([*failed, *later]) == [(1.0, 1.25, None), (100.0, 101.0, 8)]
    # with the GPUs of the next start
    assert gpu_hours(spans_of([*failed, *later])) == 8 * 0.25 + 8 * 1.0
    assert (
        gpu_hours(spans_of([*later, event("start", 2, 102.0), event("end", 2, 102.5)]))
        == 8 * 1.0 + 8 * 0.5
    )


def test_jobs_without_a_supervisor_begin_with_their_line_or_their_first_row():
    lines = [began(1, 1.0), row(1, 2.0), began(2, 50.0), row(2, 51.0)]
    assert spans(lines) == [(1.0, 2.0, 8), (50.0, 51.0, 8)]
    rows = [
        row(1, 2.0, tokens_per_s=400.0, tokens_per_s_per_device=100.0),
        row(1, 3.0),
        row(2, 9.0),
    ]
    assert spans(rows) == [(2 - 1 / 60, 3.0, 4), (9 - 1 / 60, 9.0, None)]
    assert spans_of([{"kind": "evaluation_failed", "time": 5.0}, {"attempt": 1}]) == []
    assert gpu_hours([]) == gpu_hours([Span(1, 0.0, HOUR)]) == 0.0


def test_what_is_left_goes_by_the_median_of_a_device():
    slow_start_and_a_hang = [3.0, *[100.0] * 20, 1.0]
    assert seconds_left(slow_start_and_a_hang, 8000.0, 8) == 10.0
    # only the last rows count
    assert seconds_left([1.0] * 1000 + [100.0] * 128, 8000.0, 8) == 10.0
    for speeds, gpus in ([], 8), ([0.0], 8), ([9.0], None):
        assert seconds_left(speeds, 8000.0, gpus) is None


def test_a_price_gives_a_cost():
    assert cost(12.5, {"gpu_hour_price": 2.0}) == 25.0
    assert money(12_345.0, {"gpu_hour_price": 2.0, "currency": "EUR"}) == "24,690 EUR"
    assert money(12_345.0, {"gpu_hour_price": 2.0, "currency": ""}) == "24,690"
    assert money(0.103, {"gpu_hour_price": 2.5, "currency": "EUR"}) == "0.26 EUR"
    assert (
        cost(12.5, {"gpu_hour_price": 0.0})
        is cost(None, {"gpu_hour_price": 2.0})
        is money(12.5, {})
        is None
    )


def test_durations():
    texts = {
        0.4: "0 s",
        61: "1 min 1 s",
        3600: "1 h 0 min",
        86399: "23 h 59 min",
        1798200: "20 d 19 h",
    }
    assert {seconds: duration(seconds) for seconds in texts} == texts


def test_phases_of_a_run(tmp_path):
    # Phase 1 restarted on half of the GPUs; phase 2 has a config only, and goes on at its speed.
    for phase, steps in (("phase1", 100), ("phase2", 50)):
        (tmp_path / phase).mkdir()
        (tmp_path / phase / "config.toml").write_text(
            f'[phase]\nname = "{phase}"\n[training]\nsteps = {steps}\nglobal_batch_size = 36\nseq_len = 100\n'
        )
    speed = {"phase": "phase1", "tokens": 1, "tokens_per_s_per_device": 1.0}
    rows = [row(1, 1.0 + step / 10, step, **speed, tokens_per_s=8.0) for step in range(1, 31)]
    rows += [
        row(2, 6.0 + (step - 20) / 5, step, **speed, tokens_per_s=4.0) for step in range(21, 41)
    ]
    starts = [began(1, 1.0), began(2, 6.0, gpus=4) | {"step": 20}]
    write_lines(tmp_path / "phase1/metrics.jsonl", rows)
    write_lines(tmp_path / "phase1/attempts.jsonl", starts)
    usage = usage_of(read_run(tmp_path))
    # the repeated steps are paid twice
    assert usage.gpu_hours == pytest.approx(8 * 3.0 + 4 * 4.0)
    # GPU-hours: tokens left over tokens per second of a device, in hours
    assert usage.gpu_hours_left == pytest.approx(60 + 50)
    assert usage.finish_time == pytest.approx((10.0 + 60 / 4 + 50 / 4) * HOUR)
