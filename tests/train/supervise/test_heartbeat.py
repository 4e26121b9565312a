"""Which rank is blamed for a hang."""

from __future__ import annotations

from train.supervise.heartbeat import laggards


def test_who_lags() -> None:
    beat = {"host": "n", "pid": 1, "interval_s": 5.0}
    living, silent = {**beat, "rank": 0, "step": 7, "time": 100.0}, {**beat, "rank": 1, "step": 7, "time": 70.0}
    behind = {**beat, "rank": 2, "step": 6, "time": 99.0}
    assert [b["rank"] for b in laggards([living, silent, behind])] == [1]
    assert [b["rank"] for b in laggards([living, behind])] == [2]
    assert laggards([]) == []
