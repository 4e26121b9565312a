"""Held-out documents whose text stands in training leave validation, by a plain reference; training stays."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from data_mixtures import recipe, shards
from data_mixtures.stages import containment, decontaminate, documents, stage
from data_mixtures.stages.dedup import Bands, Dedup, Signatures
from tests.data_mixtures.stages.filtered import do_all, filtered, make_recipe
from tests.data_mixtures.stages.test_dedup import WORDS, is_held_out

STAGES = (containment.HeldOut, containment.Scan, containment.Contained)
Texts = dict[str, list[list[str]]]


def with_containment(sources, minhash=False) -> recipe.Recipe:
    settings = recipe.Dedup(minhash=minhash, contained_share=0.5)
    return replace(make_recipe(sources, Path("none")), dedup=settings)


def words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count))


def some(wanted: recipe.Recipe, draw: random.Random, held_out: bool, make=lambda: "", count: int = 60) -> str:
    """A text around what `make` gives, held out or not."""
    while True:
        text = f"{words(draw, count)} {make()}".strip()
        if is_held_out(text, wanted) == held_out:
            return text


def left_out(out: Path, texts: Texts, wanted: recipe.Recipe) -> list[str]:
    filtered(out, texts, wanted)
    for kind in (Signatures, Bands, Dedup) * wanted.dedup.minhash + STAGES:
        do_all(kind(wanted, out, tuple(texts)))
    return [
        texts[source][n][row]
        for source, units in texts.items()
        for n in range(len(units))
        for row in documents.left_out(wanted, out, stage.Unit(source, n))["contained"]
    ]


def plain_rule(texts: Texts, wanted: recipe.Recipe) -> list[str]:
    """Half of the distinct 13-grams of a held-out document, in documents of training together."""
    given = [text for units in texts.values() for unit in units for text in unit]

    def grams(text: str) -> set[tuple[str, ...]]:
        parts = text.split()
        return set(zip(*(parts[i:] for i in range(decontaminate.GRAM_WORDS)), strict=False))

    train = set().union(*(grams(text) for text in given if not is_held_out(text, wanted)))
    held = [text for text in given if is_held_out(text, wanted)]
    return [text for text in held if 2 * len(grams(text) & train) >= len(grams(text))]


def test_it_is_the_plain_rule_over_sources_units_and_groups(tmp_path, monkeypatch):
    wanted, draw = with_containment(["a", "b"]), random.Random(4)
    pieces = [words(draw, 30) for _ in range(40)]

    def mixed() -> str:
        return " ".join(draw.choice(pieces) if draw.random() < 0.6 else words(draw, 30) for _ in range(2))

    given = [mixed() for _ in range(400)]  # of at most 64 runs: all of them count
    texts = {"a": [given[:150], [], given[150:220]], "b": [given[220:]]}
    expected = plain_rule(texts, wanted)
    assert 8 < len(expected) < sum(is_held_out(text, wanted) for text in given) - 8
    assert left_out(tmp_path / "units", texts, wanted) == expected
    monkeypatch.setattr(documents, "GROUPS", 1)
    assert left_out(tmp_path / "groups", texts, wanted) == expected


def test_what_lies_inside_training_text_goes_and_nothing_of_training(tmp_path):
    wanted, draw = with_containment(["web", "book"]), random.Random(1)
    inside, alone, third, long = (some(wanted, draw, True, count=n) for n in (60, 60, 60, 1200))
    quoted = some(wanted, draw, False, lambda: f"{inside} {words(draw, 9)}", 5)
    both = [" ".join(long.split()[at : at + 400]) for at in (0, 400)]
    parts = [some(wanted, draw, False, lambda part=part: part, 5) for part in both]
    little = some(wanted, draw, False, lambda: " ".join(third.split()[:30]), 5)
    again = some(wanted, draw, True, lambda: alone, 5)  # held out itself: no training text
    texts = {"web": [[quoted, alone], [parts[0], little]], "book": [[inside, long, third, again, parts[1]]]}
    assert left_out(tmp_path, texts, wanted) == [inside, long]
    counts = stage.receipt_of(tmp_path, "contained", documents.ALL)["counts"]
    assert counts == {"held_out": 5, "contained": 2}


def test_short_and_wordless_documents_stay(tmp_path):
    wanted, draw = with_containment(["a"]), random.Random(2)
    short, exact, numbers = (
        some(wanted, draw, True, count=7),
        some(wanted, draw, True, count=10),
        "1 2 3 " * 30,
    )
    while not is_held_out(numbers, wanted):
        numbers += "4 "
    around = [some(wanted, draw, False, lambda text=text: text, 20) for text in (short, exact, numbers)]
    assert left_out(
        tmp_path, {"a": [[short, exact, numbers, *around]]}, replace(wanted, filter=recipe.Filter(1))
    ) == [exact], "all words of 8 to 12 in a row count as a run"


def test_a_near_copy_that_is_left_out_of_training_contains_nothing(tmp_path):
    wanted, draw = with_containment(["a"], minhash=True), random.Random(3)
    held = some(wanted, draw, True, count=120)
    copy = some(wanted, draw, False, lambda: held, 1)
    texts = {"a": [[copy, held]]}
    assert left_out(tmp_path / "both", texts, wanted) == []
    assert documents.near_copies(wanted, tmp_path / "both", stage.Unit("a", 0)).tolist() == [0]
    assert left_out(tmp_path / "one", texts, with_containment(["a"])) == [held]


@pytest.mark.parametrize("nothing", [{"a": [[], []]}, {"a": [["no text is held out here, as few are " * 3]]}])
def test_without_held_out_documents_there_is_nothing_to_do(tmp_path, nothing):
    assert left_out(tmp_path, nothing, replace(with_containment(["a"]), valid_per_10000=0)) == []


def test_only_what_changed_is_done_again(tmp_path):
    wanted, draw = with_containment(["a", "b"]), random.Random(6)
    texts = {name: [[some(wanted, draw, place % 4 == 0) for place in range(12)]] for name in "ab"}
    left_out(tmp_path, texts, wanted)
    work = [kind(wanted, tmp_path, ("a", "b")) for kind in STAGES]
    assert [do_all(each) for each in work] == [0, 0, 0]
    texts["a"][0].append(some(wanted, draw, False))
    filtered(tmp_path, texts, wanted)
    assert [do_all(each) for each in work] == [1, 1, 1], (
        "held-out documents are the same, and so is the scan of b"
    )


def test_training_bytes_are_the_same_with_and_without(tmp_path, recipe_path, run_prepare):
    """The whole chain: what leaves is counted, and shards of training do not change."""
    plain, made, wanted = recipe_path.read_text(), {}, make_recipe(["sums"], Path("none"))
    lines = (tmp_path / "sums.jsonl").read_text()
    held = next(text for text in map(json.loads, lines.splitlines()) if is_held_out(text["text"], wanted))
    around = some(wanted, random.Random(9), False, lambda: held["text"], 20)
    (tmp_path / "sums.jsonl").write_text(json.dumps({"text": around}) + "\n" + lines)
    for name, switch in (("without", ""), ("with", "[dedup]\ncontained_share = 0.5\n")):
        recipe_path.write_text(plain.replace("[sources.notes]", f"{switch}[sources.notes]"))
        run_prepare(recipe_path, tmp_path / name)
        made[name] = [shards.read_manifest(tmp_path / name / source) for source in ("notes", "sums")]
    for before, after in zip(made["without"], made["with"], strict=True):
        assert before["shards"] == after["shards"]
        gone = after["dropped"].pop("contained")
        assert (after["dropped"], after["kept"]) == (before["dropped"], before["kept"] - gone)
        assert (gone, before["valid"] == after["valid"]) == (
            (0, True) if after["source"] == "notes" else (1, False)
        )
    assert made["with"][1]["recipe"]["dedup"]["contained_share"]
    assert "contained_share" not in made["without"][1]["recipe"]["dedup"], (
        "locks from before there was such a key still fit"
    )
