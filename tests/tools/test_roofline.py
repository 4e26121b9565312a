"""Tests of a token's time against the update table, and of the published figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from laneformer import LaneformerConfig
from tools.roofline import VARIANTS, main, project, split_layer, token_s

DOCS = Path(__file__).parents[2] / "docs"
LAYERS, MODULES_S, LAYER_S = 15, (4e-6, 16e-6), 20e-6


def clock(link_s: float, late: int = 0, **switches: object) -> float:
    config = LaneformerConfig.from_flavor("2b", **switches)
    return token_s(config, MODULES_S, link_s, modules_late=late, ends=0)


def test_every_exchange_that_the_config_does_not_delay_is_paid_for():
    quiet = LAYERS * LAYER_S
    for link_s in (0.0, 3e-6, 1e-3):
        assert clock(link_s, broadcast_delay=0) == pytest.approx(quiet + 2 * LAYERS * link_s)
    assert clock(3e-6, broadcast_delay=2) == pytest.approx(quiet + 2 * 2 * 3e-6), "early sums"
    assert clock(3e-6, broadcast_delay=2, flush=True) == pytest.approx(quiet + (2 * 2 + 1) * 3e-6)
    upper = {"broadcast_delay": 1, "first_late_layer": 10}
    assert clock(3e-6, **upper) == pytest.approx(quiet + 2 * 10 * 3e-6)
    assert clock(3e-6, **upper, flush=True) == pytest.approx(quiet + (2 * 10 + 1) * 3e-6)


@pytest.mark.parametrize("delay", [1, 2, 3, 4])
def test_a_delay_hides_a_link_as_slow_as_that_many_layers_and_then_pays_now_and_then(delay):
    quiet = clock(0.0, broadcast_delay=delay, use_early_comm=False)
    assert quiet == pytest.approx(LAYERS * LAYER_S)
    assert clock(delay * LAYER_S, broadcast_delay=delay, use_early_comm=False) == pytest.approx(
        quiet
    )
    excess_s = 7e-6
    # a wait helps the 2 * delay joins after it, which do not wait again
    waits = (2 * LAYERS - 2 * delay - 1) // (2 * delay + 1) + 1
    slow = clock(delay * LAYER_S + excess_s, broadcast_delay=delay, use_early_comm=False)
    assert slow == pytest.approx(quiet + waits * excess_s)


def test_ladder_hides_a_link_as_slow_as_the_module_beside_it():
    # attention's outputs travel while the MLP runs, the MLP's while attention runs; nothing hides
    # the last one
    assert clock(4e-6, late=1, broadcast_delay=0) == pytest.approx(LAYERS * LAYER_S + 4e-6)
    slow = clock(10e-6, late=1, broadcast_delay=0)
    assert slow == pytest.approx(LAYERS * LAYER_S + (LAYERS - 1) * 6e-6 + 10e-6)
    assert sum(split_layer(LaneformerConfig.from_flavor("2b"), 3.0)) == pytest.approx(3.0)


def test_the_rows_of_the_docs_come_out(capsys):
    # each printed row is on the page, which also has those of another model
    main()
    printed = {
        " ".join(line.replace("|", " ").split()) for line in capsys.readouterr().out.splitlines()
    }
    page = (
        (DOCS / "benchmarks/gpu-projection.md").read_text().partition("## Tokens/s of the 2B\n")[2]
    )
    rows = re.findall(r"\| (.*?\|.*?\|.*?\|) fitted \|(.*) \|", page.partition("\n## ")[0])
    assert len(rows) == 11
    assert {" ".join(f"{left}{right}".replace("|", " ").split()) for left, right in rows} <= printed
    by_place = {(row["gpus"], row["link"]): row for row in project("h200")}
    for place, name in (
        ((8, "one_shot"), "8, one-shot exchange of 1 us"),
        ((8, "custom"), "8, custom collectives of 3 us"),
        ((8, "nccl"), "8, NCCL, 8 us"),
        ((16, "between_nodes"), "16 in two nodes, 20 us"),
    ):
        cells = [f"{by_place[place][variant]:,.0f}" for variant in VARIANTS]
        assert f"| {name} | {' | '.join(cells)} |" in (DOCS / "dtp.md").read_text()
