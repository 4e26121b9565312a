"""The projection repeats the published figures, and writes its tables and plot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.cards import INPUTS, Inputs
from tools.roofline.projection import (
    VARIANTS,
    agent_loop,
    by_link,
    ceilings,
    fitted_layer_cost_s,
    large_models,
    launch_limits,
    scaling,
)

H200 = INPUTS.card("H200")


def test_the_published_ceilings_launch_examples_and_speed_come_out() -> None:
    rows = {row["gpus"]: row for row in ceilings(INPUTS)}
    assert rows["8 x H200"]["published_bytes"] == pytest.approx(7_700, rel=0.003)
    assert rows["8 x MI300X"]["published_bytes"] == pytest.approx(8_400, rel=0.003)
    assert rows["8 x H200"]["config_bytes"] < rows["8 x H200"]["published_bytes"]  # 4.44 GB, not 4
    assert rows["8 x Rubin"]["published_speed"] is rows["8 x MI450"]["published_share"] is None
    assert [row["tokens_per_s"] for row in launch_limits(INPUTS)] == pytest.approx([890, 1_800], rel=0.02)


def test_the_rows_of_docs_dtp_come_out() -> None:
    rows = {(row["gpus"], row["link"]): row for row in scaling(INPUTS, H200)}
    assert rows[8, "custom"]["delay_2"] == pytest.approx(2_100)
    assert rows[1, "none"]["delay_2"] == pytest.approx(679, rel=1e-3)
    page = (Path(__file__).parents[2] / "docs/dtp.md").read_text()
    for place, name in (
        ((8, "one_shot"), "8, one-shot exchange of 1 us"),
        ((8, "custom"), "8, custom collectives of 3 us"),
        ((8, "nccl"), "8, NCCL, 8 us"),
        ((16, "between_nodes"), "16 in two nodes, 20 us"),
    ):
        cells = [f"{rows[place][variant]:,.0f}" for variant in VARIANTS]
        assert f"| {name} | {' | '.join(cells)} |" in page


def test_the_published_rule_holds_for_one_large_model_and_implies_other_bits_for_the_others() -> None:
    rows = {row["model"]: row for row in large_models(INPUTS)}
    assert rows["Qwen3-Coder-Next"]["H200"] == pytest.approx(3_650, rel=0.005)
    assert rows["Qwen3-Coder-Next"]["MI300X"] == pytest.approx(4_000, rel=0.005)
    assert rows["Kimi-K2.6"]["implied_bits"] > 2 * rows["Kimi-K2.6"]["bits"]


def test_a_task_takes_decoding_and_tools_and_costs_a_node() -> None:
    (row,) = agent_loop(INPUTS, {"one": 2_000.0})
    assert (row["decode_s"], row["tools_s"], row["decode_share"]) == (25, 25, 0.5)
    assert row["node_usd"] == pytest.approx(50 * 8 * 3 / 3600)


def test_tokens_by_link_meet_the_table_and_only_fall() -> None:
    rows = by_link(INPUTS, H200)
    for name in ("tensor_parallel", "ladder", "delay_1", "delay_2"):
        speeds = [row[name] for row in rows]
        assert speeds == sorted(speeds, reverse=True)
    near = min(rows, key=lambda row: abs(row["link_s"] - INPUTS.at("link.custom_s")))
    assert near["delay_2"] == pytest.approx(2_100, rel=0.01)
    faster = Inputs.read({"link.custom_s": 1e-6})
    assert fitted_layer_cost_s(faster, H200) > fitted_layer_cost_s(INPUTS, H200)


@pytest.mark.rotate
def test_the_command_writes_tables_and_plot(tmp_path: Path) -> None:
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
