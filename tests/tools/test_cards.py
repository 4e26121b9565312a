"""One datasheet: every row has its source, and the copy that ships says the same."""

from __future__ import annotations

import math

import pytest

from laneformer.engine.cuda.bandwidth import DATASHEET
from tools.cards import INPUTS, Inputs, tables

KINDS = {"datasheet", "announced", "published", "measured", "assumed"}


def test_every_row_says_what_it_is_and_where_it_comes_from() -> None:
    for name, row in INPUTS.rows.items():
        assert row["kind"] in KINDS, name
        assert row["source"], name
        assert row.keys() == {"value", "kind", "source", "unit"}, name
        assert row["kind"] != "measured" or "docs/benchmarks/" in row["source"], f"{name}: on which page?"
    for name in tables()["cards"]:
        INPUTS.card(name)  # no row that Card does not know


def test_the_datasheet_that_ships_is_this_one() -> None:
    """In its order, too: a device is the first card whose name is part of its own."""
    rows = {name: card["bandwidth_bytes_per_s"] for name, card in tables()["cards"].items()}
    ours = [(name, row["value"]) for name, row in rows.items() if row["source"].startswith("NVIDIA")]
    assert [(name, rate) for name, rate in ours if rows[name]["kind"] == "datasheet"] == list(DATASHEET)


@pytest.mark.parametrize(
    ("device", "name"),
    [("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 PCIe", "H100 PCIe"), ("NVIDIA GH200 480GB", "GH200"),
     ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB")],
)  # fmt: skip
def test_a_device_is_found_by_the_name_that_its_driver_gives(device: str, name: str) -> None:
    card = INPUTS.card_of_device(device)
    assert card is not None
    assert card.name == name
    assert INPUTS.card_of_device("NVIDIA T4") is None


def test_a_card_is_found_by_a_users_name_and_missing_rows_are_refused() -> None:
    assert INPUTS.card("h100").name == "H100"
    assert INPUTS.card("a100").name == "A100-SXM4-80GB"
    assert INPUTS.card("rubin").bandwidth_bytes_per_s == 22e12
    assert math.isnan(INPUTS.card("mi450").peak_flops)
    with pytest.raises(ValueError, match=r"no datasheet of GPU 'h300'; choose from GB200, .* MI450"):
        INPUTS.card("h300")
    with pytest.raises(
        ValueError, match=r"no datasheet with peak_flops of GPU 'mi450'; choose from .* MI300X$"
    ):
        INPUTS.card("mi450", "peak_flops")


def test_a_replaced_input_counts_and_an_unknown_one_is_refused() -> None:
    faster = Inputs.read({"link.custom_s": 1e-6, "h200.bandwidth_bytes_per_s": 5e12})
    assert faster.rows["link.custom_s"]["kind"] == "given"
    assert faster.card("H200").bandwidth_bytes_per_s == 5e12
    with pytest.raises(ValueError, match=r"no input 'link.custom'; choose from .*link.custom_s"):
        Inputs.read({"link.custom": 1e-6})
