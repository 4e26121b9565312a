"""Tests that held-out documents contained in training leave validation; training stays."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from data_mixtures import ngrams, recipe, shards
from data_mixtures.stages import containment, documents, stage
from tests.data_mixtures.conftest import prepare_folder, write_lines
from tests.data_mixtures.stages import test_dedup
from tests.data_mixtures.stages.filtered import do_all, make_recipe, run_filter
from tests.data_mixtures.stages.test_dedup import WORDS, Texts, flat, is_held_out

STAGES = (containment.HeldOut, containment.Scan, containment.Contained)


def with_containment(sources, minhash=False) -> recipe.Recipe:
    settings = recipe.Dedup(minhash=minhash, contained_share=0.5)
    return replace(make_recipe(sources), dedup=settings)


def words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count))


def text_around(draw: random.Random, held_out: bool, inner: str = "", count: int = 60) -> str:
    """Draw words around `inner` until the text is held out, or is not."""
    while True:
        text = f"{words(draw, count)} {inner}".strip()
        if is_held_out(text, with_containment([])) == held_out:
            return text


def find_contained(out: Path, texts: Texts, plan: recipe.Recipe) -> list[str]:
    run_filter(out, texts, plan)
    for kind in test_dedup.STAGES * plan.dedup.minhash + STAGES:
        do_all(kind(plan, out, tuple(texts)))
    contained = []
    for source, units in texts.items():
        for n, unit in enumerate(units):
            rows = documents.find_left_out(plan, out, stage.Unit(source, n))["contained"]
            contained += [unit[row] for row in rows]
    return contained


def plain_rule(texts: Texts, plan: recipe.Recipe) -> list[str]:
    """Apply the rule: half of a held-out document's distinct 13-grams are in training."""

    def grams(text: str) -> set[tuple[str, ...]]:
        parts = text.split()
        return set(zip(*(parts[i:] for i in range(ngrams.GRAM_WORDS)), strict=False))

    held_out = [text for text in flat(texts) if is_held_out(text, plan)]
    train = set().union(*(grams(text) for text in flat(texts) if not is_held_out(text, plan)))
    return [text for text in held_out if 2 * len(grams(text) & train) >= len(grams(text))]


def test_it_is_the_plain_rule_over_sources_units_and_groups(tmp_path, monkeypatch):
    plan = with_containment(["a", "b"])
    draw = random.Random(4)
    pieces = [words(draw, 30) for _ in range(40)]

    def piece() -> str:
        return draw.choice(pieces) if draw.random() < 0.6 else words(draw, 30)

    # at most 64 runs of 13 words each, so none is left to sampling (MOST_GRAMS)
    passages = [f"{piece()} {piece()}" for _ in range(400)]
    texts = {"a": [passages[:150], [], passages[150:220]], "b": [passages[220:]]}
    expected = plain_rule(texts, plan)
    # neither none nor all: both decisions are tested
    assert 8 < len(expected) < sum(is_held_out(text, plan) for text in passages) - 8
    assert find_contained(tmp_path / "units", texts, plan) == expected
    monkeypatch.setattr(documents, "GROUPS", 1)
    assert find_contained(tmp_path / "groups", texts, plan) == expected


def test_what_lies_inside_training_text_goes_and_nothing_of_training(tmp_path):
    plan = with_containment(["web", "book"])
    draw = random.Random(1)
    inside, alone, long = (text_around(draw, True, count=n) for n in (60, 60, 1200))
    quoted = text_around(draw, False, f"{inside} {words(draw, 9)}", 5)
    # two training documents hold two thirds of `long` together, neither holds half
    parts = [text_around(draw, False, " ".join(long.split()[at : at + 400]), 5) for at in (0, 400)]
    # this text is held out itself, so it does not count as training text
    held_out_quote = text_around(draw, True, alone, 5)
    texts = {
        "web": [[quoted, alone], [parts[0]]],
        "book": [[inside, long, held_out_quote, parts[1]]],
    }
    assert find_contained(tmp_path, texts, plan) == [inside, long]
    counts = stage.receipt_of(tmp_path, "contained", documents.ALL)["counts"]
    assert counts == {"held_out": 4, "contained": 2}


def test_a_near_copy_that_is_left_out_of_training_contains_nothing(tmp_path):
    plan = with_containment(["a"], minhash=True)
    draw = random.Random(3)
    held_out = text_around(draw, True, count=120)
    texts = {"a": [[text_around(draw, False, held_out, 1), held_out]]}
    assert find_contained(tmp_path / "both", texts, plan) == []
    assert documents.near_copies(plan, tmp_path / "both", stage.Unit("a", 0)).tolist() == [0]
    assert find_contained(tmp_path / "one", texts, with_containment(["a"])) == [held_out]


@pytest.mark.parametrize(
    "nothing", [{"a": [[], []]}, {"a": [["no text is held out here, as few are " * 3]]}]
)
def test_without_held_out_documents_there_is_nothing_to_do(tmp_path, nothing):
    assert (
        find_contained(tmp_path, nothing, replace(with_containment(["a"]), valid_per_10000=0)) == []
    )


def test_training_bytes_are_the_same_with_and_without(recipe_path, tmp_path):
    plan = make_recipe(["sums"])
    texts = [
        json.loads(line)["text"] for line in (tmp_path / "sums.jsonl").read_text().splitlines()
    ]
    held_out = next(text for text in texts if is_held_out(text, plan))
    write_lines(
        tmp_path / "sums.jsonl", [text_around(random.Random(9), False, held_out, 20), *texts]
    )
    manifests = {}
    for share in (0, 0.5):
        if share:
            switch = f"[dedup]\ncontained_share = {share}\n[sources.notes]"
            recipe_path.write_text(recipe_path.read_text().replace("[sources.notes]", switch))
        prepare_folder(recipe_path, tmp_path / str(share))
        manifests[share] = [
            shards.read_manifest(tmp_path / str(share) / source) for source in ("notes", "sums")
        ]
    for before, after, contained in zip(manifests[0], manifests[0.5], (0, 1), strict=True):
        assert before["shards"] == after["shards"]
        assert (before["valid"] == after["valid"]) is not bool(contained)
        assert after["dropped"] == {**before["dropped"], "contained": contained}
        assert after["kept"] == before["kept"] - contained
    assert manifests[0.5][1]["recipe"]["dedup"]["contained_share"]
    # locks from before there was such a key still fit
    assert "contained_share" not in manifests[0][1]["recipe"]["dedup"]
