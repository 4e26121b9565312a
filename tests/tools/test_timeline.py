"""The clock over links is what the update table says."""

from __future__ import annotations

import pytest

from laneformer import LaneformerConfig
from tools.timeline import split_layer, token_s

LAYERS, MODULES_S = 15, (4e-6, 16e-6)  # of one layer: 20 us


def clock(link_s: float, late: int = 0, **switches: object) -> float:
    config = LaneformerConfig.from_flavor("2b", **switches)
    return token_s(config, MODULES_S, link_s, modules_late=late, ends=0)


def test_tensor_parallelism_pays_for_every_exchange() -> None:
    for link_s in (0.0, 1e-6, 8e-6, 1e-3):
        assert clock(link_s, broadcast_delay=0) == pytest.approx(LAYERS * 20e-6 + 2 * LAYERS * link_s)


@pytest.mark.parametrize("delay", [1, 2, 3, 4])
def test_a_delay_hides_a_link_as_slow_as_that_many_layers_and_then_pays_now_and_then(delay: int) -> None:
    quiet = clock(0.0, broadcast_delay=delay, use_early_comm=False)
    assert quiet == pytest.approx(LAYERS * 20e-6)
    assert clock(delay * 20e-6, broadcast_delay=delay, use_early_comm=False) == pytest.approx(quiet)
    excess = 7e-6
    waits = (2 * LAYERS - 2 * delay - 1) // (2 * delay + 1) + 1  # a wait helps the 2 * delay joins after it
    late = clock(delay * 20e-6 + excess, broadcast_delay=delay, use_early_comm=False)
    assert late == pytest.approx(quiet + waits * excess)


def test_early_exchanges_are_on_the_path_where_the_config_has_them() -> None:
    assert clock(3e-6, broadcast_delay=2) == pytest.approx(LAYERS * 20e-6 + 2 * 2 * 3e-6)


def test_a_flush_is_one_exchange_more_and_late_upper_layers_hide_theirs_alone() -> None:
    assert clock(3e-6, broadcast_delay=2, flush=True) == pytest.approx(LAYERS * 20e-6 + (2 * 2 + 1) * 3e-6)
    upper = {"broadcast_delay": 1, "first_late_layer": 10}
    assert clock(3e-6, **upper) == pytest.approx(LAYERS * 20e-6 + 2 * 10 * 3e-6)
    assert clock(3e-6, **upper, flush=True) == pytest.approx(LAYERS * 20e-6 + (2 * 10 + 1) * 3e-6)


def test_ladder_hides_a_link_as_slow_as_the_module_beside_it() -> None:
    # attention's outputs travel while the MLP runs, the MLP's while attention runs; the last one has nothing
    # to hide it
    assert clock(4e-6, late=1, broadcast_delay=0) == pytest.approx(LAYERS * 20e-6 + 4e-6)
    slow = clock(10e-6, late=1, broadcast_delay=0)
    assert slow == pytest.approx(LAYERS * 20e-6 + (LAYERS - 1) * 6e-6 + 10e-6)


def test_a_layer_is_split_whole() -> None:
    assert sum(split_layer(LaneformerConfig.from_flavor("2b"), 3.0)) == pytest.approx(3.0)
