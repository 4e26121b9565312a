"""Where drafts come from, what they cost, and how many are tried (engine/schedule/suffix.h, cost.h)."""

from __future__ import annotations

import itertools
import random

import pytest

from laneformer.engine.cpu import _core
from tests.laneformer.engine.assets import engine_of, random_model, small_config

LONGEST = 64  # ids that agree


def longest_end(text: list[int], other: list[int], own: bool) -> tuple[int, int]:
    """By brute force: the length of the longest end of `text` in `other`, and where what followed it is."""
    best = (0, 0)
    for place in range(1, len(other)):
        pairs = zip(reversed(other[:place]), reversed(text), strict=False)
        length = min(LONGEST, len(list(itertools.takewhile(lambda p: p[0] == p[1], pairs))))
        if not (own and place == len(text)) and length >= max(2, best[0]):
            best = (length, place)
    return best


@pytest.mark.parametrize("vocab", [3, 30, 3000])
def test_drafts_follow_the_longest_end_that_stood_before(vocab: int) -> None:
    draw, drafted = random.Random(vocab), 0
    phrases = [[draw.randrange(vocab) for _ in range(draw.randrange(2, 90))] for _ in range(6)]
    text = [draw.randrange(vocab) for _ in range(5)]
    drafter = _core.Drafter([], text, [])
    for _ in range(300):
        for i in draw.choice(phrases) if draw.random() < 0.1 else [draw.randrange(vocab)]:
            drafter.extend(i)
            text.append(i)
        drafts, odds = drafter.propose(5)
        length, place = longest_end(text, text, own=True)
        if vocab > 3:  # else the walk over a chain of many places may end before the longest one
            assert bool(drafts) == (length >= 2)
            follows = (text[place:] + drafts)[:5] if drafts else []
            assert drafts == follows
        assert odds == sorted(odds, reverse=True)
        drafted += bool(drafts)
    assert drafted > 20


def test_prediction_and_past_outputs_are_texts_too() -> None:
    past = [list(range(100, 140)), list(range(300, 310))]
    drafter = _core.Drafter(prediction=[7, 8, 9, 10, 11], prompt=[1, 2, 8, 9], past=past)
    assert drafter.propose(9)[0] == [10, 11]  # and no further: the prompt does not follow a prediction
    for i in (104, 105):
        drafter.extend(i)
    assert drafter.propose(3)[0] == [106, 107, 108]
    for i in (308, 309):
        drafter.extend(i)
    assert drafter.propose(3)[0] == []  # that output's end


def test_odds_follow_what_was_right_and_drafts_are_tried_again() -> None:
    drafter = _core.Drafter([], [1, 2, 3, 4, 5, 6] * 4, [])
    first = drafter.propose(4)[1]
    for _ in range(20):
        drafter.verified(4, 0)
    assert drafter.propose(4)[1][0] < 0.2 * first[0]
    for _ in range(400):  # proposals that were not tried
        drafter.verified(0, 0)
    assert drafter.propose(4)[1][0] > 0.8 * first[0]
    for _ in range(100):
        drafter.propose(4)
        drafter.verified(4, 4)
    assert drafter.propose(4)[1][3] > 0.9


def test_cost_is_what_passes_took() -> None:
    cost = _core.Cost()
    assert cost.of(1) == 1.0
    for _ in range(50):
        cost.passed(1, 0.010)
        cost.passed(4, 0.014)
    assert cost.of(1) == pytest.approx(0.010)
    assert cost.of(3) == pytest.approx(0.010 + 0.004 * 2 / 3)
    assert cost.of(8) > cost.of(4)
    assert cost.of(64) == pytest.approx(2 * cost.of(32))
    cost.passed(1, 10.0)  # the thread had lost its core
    assert cost.of(1) < 0.012
    for _ in range(1000):
        cost.passed(1, 0.020)
    assert cost.of(4) > 0.020  # what was long ago counts no more


@pytest.mark.parametrize("each_column", [0.0, 0.25, 2.0])
def test_as_many_drafts_are_tried_as_their_columns_are_worth(each_column: float) -> None:
    with engine_of(random_model(small_config(vocab_size=100, max_position_embeddings=192))) as engine:
        engine._open().fix_cost(each_column)
        forced = {"logit_bias": {5: 100}, "max_new_tokens": 100}
        repeats = engine.generate_detailed([5] * 40, **forced).statistics
        assert repeats.passes == 100 - repeats.accepted_tokens
        if each_column == 2.0:  # not even what is certain
            assert repeats.proposed_tokens == 0
        else:
            assert repeats.accepted_tokens > 60
        wrong = engine.generate_detailed([1, 2, 3, 4] * 10, temperature=3.0, max_new_tokens=100)
        assert wrong.statistics.proposed_tokens < (300 if each_column == 0.0 else 20)


def test_drafts_of_one_leave_room_for_all() -> None:
    with engine_of(random_model(small_config(max_position_embeddings=192))) as engine:
        prompts = [[i, i + 1] * 20 for i in range(8)]
        plain = engine.generate_batch(prompts, max_new_tokens=60, speculate=0)
        assert engine.statistics.proposed_tokens == 0
        assert engine.generate_batch(prompts, max_new_tokens=60) == plain
        assert engine.statistics.accepted_tokens > 0


def test_a_prediction_is_drafted_and_changes_no_token() -> None:
    with engine_of(random_model(small_config(max_position_embeddings=192))) as engine:
        prompt, options = [3, 1, 4, 1, 5], {"max_new_tokens": 60, "temperature": 1.0, "seed": 5}
        plain = engine.generate(prompt, **options, speculate=0)
        predicted = engine.generate_detailed(prompt, **options, prediction=plain)
        assert predicted.ids == plain
        assert predicted.statistics.accepted_tokens > 40
        with pytest.raises(ValueError, match="prediction holds 1000"):
            engine.generate(prompt, prediction=[1000])


@pytest.mark.parametrize(("each_column", "temperature"), [(0.05, 1.0), (0.25, 0.0), (0.6, 1.0)])
def test_drafts_cost_next_to_nothing_where_they_fail(each_column: float, temperature: float) -> None:
    """By the cost of columns; with few ids, ends of the text stood before all the time and mean little."""
    with engine_of(random_model(small_config(vocab_size=16, max_position_embeddings=512))) as engine:
        engine._open().fix_cost(each_column)
        for seed in range(3):
            prompt = [random.Random(seed).randrange(16) for _ in range(40)]
            options = {"max_new_tokens": 400, "temperature": temperature, "seed": seed, "ignore_eos": True}
            done = engine.generate_detailed(prompt, **options, reuse_prefix=False).statistics
            assert done.passes + each_column * done.proposed_tokens < 1.03 * 400
