"""The page kit: number formats."""

from __future__ import annotations

from records.page import code, percent, short, table


def test_short_numbers() -> None:
    numbers = [0, 12, 999, 1000, 1_234_567, 2_320_069_632, 6e12, 999_900]
    assert [*map(short, numbers)] == ["0", "12", "999", "1 k", "1.23 M", "2.32 G", "6 T", "1 M"]


def test_units_and_what_is_not_a_number() -> None:
    assert short(17.4e9, "B/s") == "17.4 GB/s"
    assert percent(0.4391) == "43.9 %"
    assert all("not measured" in short(x) for x in (None, float("nan"), "x"))
    assert "not measured" in percent(None)


def test_text_is_never_markup() -> None:
    assert "<i>" not in code("<i>") + table(["<i>"], [])
