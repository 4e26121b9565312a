"""Tests of the demo: all its stages, and the figures of its last line."""

from __future__ import annotations

import pytest

from tests.records.lines import write_lines
from tools import demo


@pytest.mark.rotate
def test_every_stage_at_a_few_steps(tmp_path):
    figures = demo.main(tmp_path / "demo", steps1=4, steps2=4, steps3=4, ranks=1)
    assert figures["engine_matches_hf"]
    assert figures["hf_max_logit_diff"] == 0
    assert (tmp_path / "demo/dashboard.html").exists()


def test_a_phase_has_its_first_and_its_last_loss(tmp_path):
    rows = [
        {"phase": phase, "loss": loss, "tokens_total": 64 * (1 + number)}
        for number, phase in enumerate(demo.PHASES)
        for loss in (9.0 - number, 5.0 - number, 4.0 - number)
    ]
    write_lines(tmp_path / "metrics.jsonl", rows)
    losses = {"phase1_loss_first": 9.0, "phase1_loss_last": 4.0, "phase2_loss_first": 8.0}
    losses |= {"phase2_loss_last": 3.0, "sft_loss_first": 7.0, "sft_loss_last": 2.0}
    assert demo.training_figures(tmp_path) == losses | {"tokens": 192}
