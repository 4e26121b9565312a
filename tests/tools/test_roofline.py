"""The projection repeats the published figures, and its clock is what the update table says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from laneformer import LaneformerConfig
from tools.roofline.projection import (
    Inputs,
    by_link,
    ceilings,
    large_models,
    launch_limit,
    layer_cost_s,
    scaling,
)
from tools.roofline.timeline import laneformer_joins, token_s

INPUTS = Inputs.read()
LAYERS, MODULES_S = 15, (4e-6, 16e-6)  # of one layer: 20 us


def clock(link_s: float, late: int = 0, **switches: object) -> float:
    config = LaneformerConfig.from_flavor("2b", **switches)
    return token_s(LAYERS, MODULES_S, link_s, laneformer_joins(config), modules_late=late, ends=0)


def test_the_published_ceilings_launch_example_and_speed_come_out():
    rows = {row["gpus"]: row for row in ceilings(INPUTS)}
    assert rows["8 x h200"]["published_bytes"] == pytest.approx(7_700, rel=0.003)
    assert rows["8 x mi300x"]["published_bytes"] == pytest.approx(8_400, rel=0.003)
    assert rows["8 x h200"]["config_bytes"] < rows["8 x h200"]["published_bytes"]  # 4.44 GB, not 4
    assert launch_limit(INPUTS) == pytest.approx(890, rel=0.003)
    fitted = [
        row["delay_2"] for row in scaling(INPUTS, "h200") if (row["gpus"], row["link"]) == (8, "custom")
    ]
    assert fitted == pytest.approx([2_100])


def test_the_published_rule_holds_for_one_large_model_and_implies_other_bits_for_the_others():
    rows = {row["model"]: row for row in large_models(INPUTS)}
    assert rows["Qwen3-Coder-Next"]["h200"] == pytest.approx(3_650, rel=0.005)
    assert rows["Qwen3-Coder-Next"]["mi300x"] == pytest.approx(4_000, rel=0.005)
    assert rows["Kimi-K2.6"]["implied_bits"] > 2 * rows["Kimi-K2.6"]["bits"]


def test_tensor_parallelism_pays_for_every_exchange():
    for link_s in (0.0, 1e-6, 8e-6, 1e-3):
        assert clock(link_s, broadcast_delay=0) == pytest.approx(LAYERS * 20e-6 + 2 * LAYERS * link_s)


@pytest.mark.parametrize("delay", [1, 2, 3, 4])
def test_a_delay_hides_a_link_as_slow_as_that_many_layers_and_then_pays_now_and_then(delay: int):
    quiet = clock(0.0, broadcast_delay=delay, use_early_comm=False)
    assert quiet == pytest.approx(LAYERS * 20e-6)
    assert clock(delay * 20e-6, broadcast_delay=delay, use_early_comm=False) == pytest.approx(quiet)
    excess = 7e-6
    waits = (2 * LAYERS - 2 * delay - 1) // (2 * delay + 1) + 1  # a wait helps the 2 * delay joins after it
    late = clock(delay * 20e-6 + excess, broadcast_delay=delay, use_early_comm=False)
    assert late == pytest.approx(quiet + waits * excess)


def test_early_exchanges_are_on_the_path_where_the_config_has_them():
    assert clock(3e-6, broadcast_delay=2) == pytest.approx(LAYERS * 20e-6 + 2 * 2 * 3e-6)


def test_ladder_hides_a_link_as_slow_as_the_module_beside_it():
    # attention's outputs travel while the MLP runs, the MLP's while attention runs; the last one has nothing
    # to hide it
    assert clock(4e-6, late=1, broadcast_delay=0) == pytest.approx(LAYERS * 20e-6 + 4e-6)
    slow = clock(10e-6, late=1, broadcast_delay=0)
    assert slow == pytest.approx(LAYERS * 20e-6 + (LAYERS - 1) * 6e-6 + 10e-6)


def test_tokens_by_link_meet_the_table_and_only_fall():
    rows = by_link(INPUTS, "h200")
    for name in ("tensor_parallel", "ladder", "delay_1", "delay_2"):
        speeds = [row[name] for row in rows]
        assert speeds == sorted(speeds, reverse=True)
    near = min(rows, key=lambda row: abs(row["link_s"] - INPUTS["link.custom_s"]))
    assert near["delay_2"] == pytest.approx(2_100, rel=0.01)


def test_a_replaced_input_counts_and_an_unknown_one_is_refused():
    faster = Inputs.read({"link.custom_s": 1e-6})
    assert faster.rows()["link.custom_s"]["kind"] == "given"
    assert layer_cost_s(faster, "h200") > layer_cost_s(INPUTS, "h200")
    with pytest.raises(ValueError, match=r"no input 'link.custom'; choose from .*link.custom_s"):
        Inputs.read({"link.custom": 1e-6})


def test_the_command_writes_tables_and_plot(tmp_path: Path):
    command = [sys.executable, "-m", "tools.roofline", "--gpu", "mi300x", "--out", str(tmp_path / "out")]
    command += ["--page", str(tmp_path / "docs/benchmarks/page.md")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "mi300x.layer_cost_s" in json.loads((tmp_path / "out/roofline.json").read_text())["inputs"]
    assert "fitted" in run.stdout
    page = (tmp_path / "docs/benchmarks/page.md").read_text()
    assert "| 8 | 1 | custom |" in page
    assert (tmp_path / "docs/benchmarks" / page.split("](")[1].split(")")[0]).is_file()
    assert (tmp_path / "out/roofline.svg").read_text().lstrip().startswith("<?xml")
    wrong = subprocess.run([*command[:3], "--set", "link.custom_s=fast"], capture_output=True, text=True)
    assert wrong.returncode == 1
    assert wrong.stderr == "tools.roofline: --set 'link.custom_s=fast' must be NAME=NUMBER\n"
