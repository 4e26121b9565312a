"""Tests of the table of datasheets: cards are found by the names that users and drivers use."""

import math

import pytest

from laneformer.engine.cuda.cards import CARDS, card_named, card_of_device


def test_every_card_says_what_it_is_and_is_found_by_its_own_name():
    for card in CARDS:
        assert card.source, card.name
        assert card_of_device(f"NVIDIA {card.name} 80GB") == card, (
            "a more specific name stands first"
        )
    assert [card.name for card in CARDS if math.isnan(card.peak_flops)] == ["Rubin", "MI450"]


def test_cards_are_found_by_the_names_of_users_and_drivers():
    users = {"h100": "H100", "a100": "A100-SXM4-80GB", "GH200": "GH200", "rtx 4": "RTX 4090"}
    assert {name: card_named(name).name for name in users} == users
    drivers = {
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H100 PCIe": "H100 PCIe",
        "NVIDIA GH200 480GB": "GH200",
    }
    assert {name: getattr(card_of_device(name), "name", None) for name in drivers} == drivers
    assert card_of_device("NVIDIA T4") is None
    with pytest.raises(
        ValueError, match=r"no datasheet of GPU 'h300'; choose from GB200, .* MI450"
    ):
        card_named("h300")
